/* failing_malloc.c - loaded before libc: makes a number of the calling thread's allocations fail, from the nth on.
 *
 * For tests/support/subjects/faults.py. While armed it counts the calls of malloc, calloc, realloc and mmap by modules below the
 * folder FAULTS_IN, and the data of every NumPy array, whose allocator is faults_handler(). Other allocations of NumPy
 * and CPython never fail, since some of NumPy's loops do not survive that.
 */
#include <Python.h>

#include <frameobject.h> /* of Python 3.10 */

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <limits.h>
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
static __thread uint64_t *places;       /* of the allocations that are counted, (room,); NULL: they are not recorded */
static __thread long room, seen;

void faults_arm(long first, long many) { left = first, width = many, hits = 0; }

/* Nothing fails until faults_disarm, which returns 0; the place of each allocation is written to `out`, (size,). */
void faults_record(uint64_t *out, long size) { places = out, room = size, seen = 0, left = LONG_MAX; }

/* How many allocations were recorded, those beyond the room included. */
long faults_recorded(void) { return seen; }

long faults_disarm(void) {
    const long failed = hits;
    left = width = hits = 0;
    places = NULL;
    return failed;
}

static int in_our_modules(const void *address) {
    const char *folder = getenv("FAULTS_IN");
    Dl_info module;
    return folder && dladdr(address, &module) && module.dli_fname && !strncmp(module.dli_fname, folder, strlen(folder));
}

static uint64_t mixed(uint64_t hash, uint64_t more) { return (hash ^ more) * 0x9E3779B97F4A7C15 + (hash >> 29); }

/* A hash of the calls that led to this one: in C those of our modules, in Python the lines of the innermost four. */
static uint64_t this_place(void) {
    void *calls[48];
    uint64_t hash = 1;
    for (int i = 0, n = backtrace(calls, 48); i < n; i++)
        if (in_our_modules(calls[i])) hash = mixed(hash, (uint64_t)(uintptr_t)calls[i]);
    if (!PyGILState_Check()) return hash;
    PyFrameObject *frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    for (int i = 0; frame && i < 4; i++) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        hash = mixed(mixed(hash, (uint64_t)(uintptr_t)code), (uint64_t)PyFrame_GetLineNumber(frame));
        Py_DECREF(code);
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    return hash;
}

static void record(void) {
    uint64_t *out = places;
    places = NULL; /* what this allocates is not recorded */
    if (seen < room) out[seen] = this_place();
    seen++;
    places = out;
}

static int fails(void) {
    if (places) record();
    if (left == 0 || --left > 0) return 0;
    if (--width > 0) left = 1;
    hits++;
    errno = ENOMEM;
    return 1;
}

#define OURS_FAILS (left && in_our_modules(__builtin_return_address(0)) && fails())

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
