/* kvc_system.h - what kernels and modules ask of the system: bytes of a file at a position, memory in pages, masks of signals. POSIX has
 * it; Windows has the same under other names, over the descriptors of its C library.
 *
 * Include it first: a file that needs more of Linux defines _GNU_SOURCE before. */
#ifndef KVC_SYSTEM_H
#define KVC_SYSTEM_H

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#include <io.h>
#include <process.h>
#else
#include <signal.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

enum {
    KVC_LARGEST_PAGE = 65536, /* of the systems that this runs on: a multiple of their page sizes */
    KVC_HUGE_PAGE = 1 << 21,
};

#if !defined(EDQUOT) /* a full disk is one errno there */
#define EDQUOT ENOSPC
#endif

#if defined(_WIN32)
typedef int kvc_process;
typedef char kvc_signals;
typedef struct kvc_part {
    void *iov_base;
    size_t iov_len;
} kvc_part;

/* No signal of Windows is for a thread. */
static inline void kvc_block_signals(kvc_signals *before) { *before = 0; }
static inline void kvc_allow_signals(const kvc_signals *before) { (void)before; }

static inline kvc_process kvc_this_process(void) { return _getpid(); }

static inline size_t kvc_page_size(void) {
    SYSTEM_INFO found;
    GetSystemInfo(&found);
    return found.dwPageSize;
}

static inline void kvc_machine_memory(uint64_t *total, uint64_t *available) {
    MEMORYSTATUSEX found = {.dwLength = sizeof found};
    if (!GlobalMemoryStatusEx(&found)) found.ullTotalPhys = found.ullAvailPhys = 0;
    *total = found.ullTotalPhys, *available = found.ullAvailPhys;
}

static inline void *kvc_allocate_aligned(size_t alignment, size_t n) { return _aligned_malloc(n, alignment); }
static inline void kvc_free_aligned(void *bytes) { _aligned_free(bytes); }

/* The position is that of the call alone, as with pread; that of the descriptor, which nothing here uses, moves. */
static inline int64_t kvc_transfer_at(int fd, void *buffer, size_t n, int64_t offset, int is_read) {
    enum { MOST = 1 << 30 }; /* bytes of a call, which counts 32 bits */
    HANDLE file = (HANDLE)_get_osfhandle(fd);
    OVERLAPPED place = {.Offset = (DWORD)offset, .OffsetHigh = (DWORD)((uint64_t)offset >> 32)};
    const DWORD count = n < MOST ? (DWORD)n : MOST;
    DWORD done = 0;
    if (is_read ? ReadFile(file, buffer, count, &done, &place) : WriteFile(file, buffer, count, &done, &place)) return done;
    switch (GetLastError()) {
    case ERROR_HANDLE_EOF: return 0;
    case ERROR_DISK_FULL:
    case ERROR_HANDLE_DISK_FULL: errno = ENOSPC; break;
    case ERROR_INVALID_HANDLE: errno = EBADF; break;
    case ERROR_ACCESS_DENIED:
    case ERROR_LOCK_VIOLATION: errno = EACCES; break;
    default: errno = EIO;
    }
    return -1;
}
static inline int64_t kvc_read_at(int fd, void *buffer, size_t n, int64_t offset) { return kvc_transfer_at(fd, buffer, n, offset, 1); }
static inline int64_t kvc_write_at(int fd, const void *buffer, size_t n, int64_t offset) {
    return kvc_transfer_at(fd, (void *)(uintptr_t)buffer, n, offset, 0);
}
static inline int64_t kvc_read_parts_at(int fd, const kvc_part *parts, int count, int64_t offset) {
    return count > 0 ? kvc_read_at(fd, parts->iov_base, parts->iov_len, offset) : 0; /* the caller asks for the rest */
}

/* Windows keeps the room of a file that is not sparse. */
static inline int kvc_punch(int fd, int64_t offset, int64_t n) {
    (void)fd, (void)offset, (void)n;
    return 0;
}

/* Pages of 64 KiB at least; all of them count against what the system may give, also those in parts. */
static inline unsigned char *kvc_map(size_t nbytes, int in_parts, size_t *mapped) {
    (void)in_parts;
    *mapped = nbytes;
    return (unsigned char *)VirtualAlloc(NULL, nbytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}
static inline void kvc_unmap(void *bytes, size_t mapped) {
    (void)mapped;
    VirtualFree(bytes, 0, MEM_RELEASE);
}
static inline void kvc_give_back(void *bytes, size_t n) {
    VirtualAlloc(bytes, n, MEM_RESET, PAGE_READWRITE); /* no page of them is written to the disk, */
    VirtualUnlock(bytes, n);                           /* and this takes them from the process */
}

#else /* POSIX */
typedef pid_t kvc_process;
typedef sigset_t kvc_signals;
typedef struct iovec kvc_part;

static inline void kvc_block_signals(kvc_signals *before) {
    kvc_signals all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, before);
}
static inline void kvc_allow_signals(const kvc_signals *before) { pthread_sigmask(SIG_SETMASK, before, NULL); }

static inline kvc_process kvc_this_process(void) { return getpid(); }
static inline size_t kvc_page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static inline void kvc_machine_memory(uint64_t *total, uint64_t *available) {
    *total = *available = (uint64_t)sysconf(_SC_PAGESIZE) * (uint64_t)sysconf(_SC_PHYS_PAGES);
}

static inline void *kvc_allocate_aligned(size_t alignment, size_t n) {
    void *bytes = NULL;
    return posix_memalign(&bytes, alignment, n) ? NULL : bytes;
}
static inline void kvc_free_aligned(void *bytes) { free(bytes); }

static inline int64_t kvc_read_at(int fd, void *buffer, size_t n, int64_t offset) { return pread(fd, buffer, n, (off_t)offset); }
static inline int64_t kvc_write_at(int fd, const void *buffer, size_t n, int64_t offset) { return pwrite(fd, buffer, n, (off_t)offset); }
static inline int64_t kvc_read_parts_at(int fd, const kvc_part *parts, int count, int64_t offset) {
    return preadv(fd, parts, count, (off_t)offset);
}

/* Gives the room of these bytes of the file back, which read as zeros from then on; whether the file system can. */
static inline int kvc_punch(int fd, int64_t offset, int64_t n) {
#if defined(FALLOC_FL_PUNCH_HOLE)
    int failed;
    while ((failed = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)n)) && errno == EINTR) continue;
    return !failed;
#else
    (void)fd, (void)offset, (void)n;
    return 0;
#endif
}

#if defined(MADV_HUGEPAGE) /* Linux */
#define KVC_GIVE_BACK MADV_DONTNEED
#else
#define MADV_HUGEPAGE MADV_NORMAL
#define MADV_NOHUGEPAGE MADV_NORMAL
#define KVC_GIVE_BACK MADV_FREE /* MADV_DONTNEED leaves pages in memory there */
#endif

/* Kernels before 6.7 do not align by themselves. A page that nobody may read stays behind the bytes: so the system merges them with no
 * other mapping, and its count of huge pages is theirs. */
static inline unsigned char *kvc_map_aligned(size_t nbytes, size_t *mapped) {
    const size_t size = (nbytes + KVC_LARGEST_PAGE - 1) / KVC_LARGEST_PAGE * KVC_LARGEST_PAGE, whole = size + KVC_HUGE_PAGE + KVC_LARGEST_PAGE;
    unsigned char *bytes = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED) return NULL;
    const size_t before = (KVC_HUGE_PAGE - (size_t)bytes % KVC_HUGE_PAGE) % KVC_HUGE_PAGE, behind = KVC_HUGE_PAGE - before;
    unsigned char *first = bytes + before;
    *mapped = size + KVC_LARGEST_PAGE;
    if (before) munmap(bytes, before);
    if (behind) munmap(first + *mapped, behind);
    if (mprotect(first, size, PROT_READ | PROT_WRITE) == 0) return first;
    munmap(first, *mapped);
    return NULL;
}

/* Memory that is zero and untouched, from a huge page on at the beginning of one; NULL if the system refuses it. `mapped`: bytes for
 * kvc_unmap. `in_parts`: parts are in use at a time, of more than the system may have, without huge pages. */
static inline unsigned char *kvc_map(size_t nbytes, int in_parts, size_t *mapped) {
    unsigned char *bytes;
    *mapped = nbytes;
    if (nbytes >= KVC_HUGE_PAGE && !in_parts) {
        bytes = kvc_map_aligned(nbytes, mapped);
    } else {
        const int more = in_parts ? MAP_NORESERVE : 0;
        bytes = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | more, -1, 0);
        if (bytes == MAP_FAILED) bytes = NULL;
    }
    if (bytes) madvise(bytes, nbytes, in_parts ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    return bytes;
}
static inline void kvc_unmap(void *bytes, size_t mapped) { munmap(bytes, mapped); }

/* Lets the system take back whole pages, whose bytes are undefined from now on. */
static inline void kvc_give_back(void *bytes, size_t n) { madvise(bytes, n, KVC_GIVE_BACK); }
#endif

#endif
