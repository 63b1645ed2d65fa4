/* failing_malloc.c - loaded before libc: makes a number of the calling thread's allocations fail, from the nth on.
 *
 * For tests/support/faults.py. While armed it counts the calls of malloc, calloc, realloc and mmap by modules below the
 * folder FAULTS_IN, and the data of every NumPy array, whose allocator is faults_handler(). Other allocations of NumPy
 * and CPython never fail, since some of NumPy's loops do not survive that.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void __libc_free(void *old);

static __thread long left, width, hits; /* allocations before the first that fails; how many fail; how many did */

void faults_arm(long first, long count) { left = first, width = count, hits = 0; }

long faults_disarm(void) {
    const long failed = hits;
    left = width = hits = 0;
    return failed;
}

static int fails(void) {
    if (left == 0 || --left > 0) return 0;
    if (--width > 0) left = 1;
    hits++;
    errno = ENOMEM;
    return 1;
}

static int ours(const void *caller) {
    const char *folder = left ? getenv("FAULTS_IN") : NULL;
    Dl_info module;
    return folder && dladdr(caller, &module) && module.dli_fname && !strncmp(module.dli_fname, folder, strlen(folder));
}

#define OURS_FAILS (ours(__builtin_return_address(0)) && fails())

void *malloc(size_t size) { return OURS_FAILS ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return OURS_FAILS ? NULL : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return OURS_FAILS ? NULL : __libc_realloc(old, size); }
void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    if (OURS_FAILS) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, size, protection, flags, file, offset);
}

static void *array_malloc(void *ctx, size_t size) { return (void)ctx, fails() ? NULL : __libc_malloc(size); }
static void *array_calloc(void *ctx, size_t count, size_t size) {
    return (void)ctx, fails() ? NULL : __libc_calloc(count, size);
}
static void *array_realloc(void *ctx, void *old, size_t size) {
    return (void)ctx, fails() ? NULL : __libc_realloc(old, size);
}
static void array_free(void *ctx, void *old, size_t size) { (void)ctx, (void)size, __libc_free(old); }

/* NumPy's PyDataMem_Handler, version 1. */
static const struct {
    char name[127];
    uint8_t version;
    void *ctx;
    void *(*malloc)(void *, size_t);
    void *(*calloc)(void *, size_t, size_t);
    void *(*realloc)(void *, void *, size_t);
    void (*free)(void *, void *, size_t);
} handler = {"faults", 1, NULL, array_malloc, array_calloc, array_realloc, array_free};

const void *faults_handler(void) { return &handler; }
