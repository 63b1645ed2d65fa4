/* memory.h - memory that ends where its contents end, so that an access beyond them is detected.
 *
 * If a tool watches every allocation (ASan; memcheck, with -DWATCHED) the memory comes from malloc and is not
 * initialised. Otherwise it is between two inaccessible pages, directly before or directly after one.
 */
#ifndef MEMORY_H
#define MEMORY_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#undef near /* words of 16-bit compilers */
#undef far
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(WATCHED)
#define WATCHED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) && !defined(WATCHED)
#define WATCHED
#endif

typedef struct memory {
    void *at;   /* the usable `size` bytes */
    void *base; /* the allocation to free */
    size_t size, mapped;
} memory;

/* Allocates at a multiple of `align`; of 64 only if size is one too. at_end: an inaccessible page follows directly. */
static inline memory take(size_t size, size_t align, int at_end) {
    memory m = {.size = size};
#if defined(WATCHED)
    (void)at_end;
    m.base = m.at = align > 16 ? aligned_alloc(align, size) : malloc(size ? size : 1);
    if (!m.base) abort();
#else
#if defined(_WIN32)
    const size_t page = 4096;
#else
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
#endif
    const size_t inner = (size + page - 1) / page * page;
    (void)align;
    m.mapped = inner + 2 * page;
#if defined(_WIN32)
    m.base = VirtualAlloc(NULL, m.mapped, MEM_RESERVE, PAGE_NOACCESS);
    if (!m.base || (inner && !VirtualAlloc((char *)m.base + page, inner, MEM_COMMIT, PAGE_READWRITE))) abort();
#else
    m.base = mmap(NULL, m.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m.base == MAP_FAILED) abort();
    if (inner && mprotect((char *)m.base + page, inner, PROT_READ | PROT_WRITE)) abort();
#endif
    m.at = (char *)m.base + page + (at_end ? inner - size : 0);
    memset(m.at, 0xff, size); /* NaN, if it is read */
#endif
    return m;
}

static inline void give_back(memory *m) {
#if defined(WATCHED)
    free(m->base);
#elif defined(_WIN32)
    VirtualFree(m->base, 0, MEM_RELEASE);
#else
    munmap(m->base, m->mapped);
#endif
    m->base = m->at = NULL;
}

#endif
