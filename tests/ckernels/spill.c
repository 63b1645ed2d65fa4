/* spill.c - the residency of units by itself: what `run spill` runs, as it is, with AddressSanitizer and with ThreadSanitizer.
 *
 * Threads hold random units of an arena of which a fifth may be in memory. All bytes of a unit are its number of changes. Requests
 * fail at random, in some rounds: what cannot be read is told, what is told to be there has its bytes, and what was changed
 * without being there is not there until it is replaced. It includes the source, to make requests fail. Then a disk that has room
 * for half of the units: slots of blocks that nobody has go back to it, but not those of a block that is without references for a
 * moment, while a call counts.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

static atomic_uint asked;
static atomic_int one_of; /* requests fails; 0: none does */

enum { PAGE = 4096, MOST_PAGES = 4096 };
static unsigned char on_disk[MOST_PAGES]; /* pages of the file that have room */
static atomic_int pages_used, most_pages = MOST_PAGES;
static atomic_int is_shut; /* requests that write wait */

static void take_pages(off_t offset, size_t n, int is_used) {
    for (off_t p = offset / PAGE; p < (offset + (off_t)n) / PAGE; p++) {
        pages_used += is_used - on_disk[p];
        on_disk[p] = (unsigned char)is_used;
    }
}

static int some_fallocate(int fd, int mode, off_t offset, off_t n) {
    (void)fd, (void)mode;
    take_pages(offset, (size_t)n, 0); /* with the lock of the spill */
    return 0;
}

static int fails(void) { return one_of && (atomic_fetch_add(&asked, 1) * 2654435761u >> 16) % (unsigned)one_of == 0; }
static ssize_t some_pread(int fd, void *buffer, size_t n, off_t offset) {
    if (fails()) return errno = EIO, -1;
    return pread(fd, buffer, n > 1000 && fails() ? 1000 : n, offset);
}
static ssize_t some_pwrite(int fd, const void *buffer, size_t n, off_t offset) {
    while (is_shut) sched_yield();
    if (fails()) return errno = ENOSPC, -1;
    if (most_pages < MOST_PAGES) { /* one thread writes */
        if (pages_used + (int)(n / PAGE) > most_pages) return errno = ENOSPC, -1;
        take_pages(offset, n, 1);
    }
    return pwrite(fd, buffer, n, offset);
}
#define pread some_pread
#define pwrite some_pwrite
#define fallocate some_fallocate
#include "kvc_spill.c"
#undef pread
#undef pwrite
#undef fallocate

enum { LAYERS = 3, BLOCKS = 120, MOST_HELD = 16, CALLERS = 4, TURNS = 1250 };

#define CHECK(true, ...) ((true) ? (void)0 : (fprintf(stderr, "spill.c:%d: ", __LINE__), fprintf(stderr, __VA_ARGS__), \
                                              fputc('\n', stderr), abort()))

static const size_t sizes[LAYERS] = {2304, 576, 9216}; /* several on a page of the system, one on several */
static kvc_spill *spill;
static unsigned char *arena;
static pthread_rwlock_t users[LAYERS * BLOCKS]; /* who changes a unit is alone, as the lock of a cache has it */
static unsigned char changes[LAYERS * BLOCKS], lost[LAYERS * BLOCKS];

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static unsigned char *place_of(int layer, int block) {
    size_t start = 0;
    for (int i = 0; i < layer; i++) start += sizes[i] * BLOCKS;
    return arena + start + sizes[layer] * (size_t)block;
}

static void read_some(const kvc_units *units) {
    const int layer = units->layer;
    int64_t bad = 0, absent = 0;
    for (int64_t i = 0; i < units->count; i++) pthread_rwlock_rdlock(&users[layer * BLOCKS + units->runs[i].block]);
    const int64_t missing = kvc_hold(spill, units, KVC_TO_READ);
    for (int64_t i = 0; i < units->count; i++) {
        const int block = units->runs[i].block, unit = layer * BLOCKS + block;
        const unsigned char *bytes = place_of(layer, block);
        int same = 1;
        for (size_t b = 0; b < sizes[layer]; b += 96) same &= bytes[b] == changes[unit];
        bad += !same && !lost[unit];
        absent += lost[unit];
    }
    CHECK(missing >= absent, "%ld units are missing, of which %ld were lost", (long)missing, (long)absent);
    CHECK(bad <= missing - absent, "%ld units have other bytes, %ld are missing", (long)bad, (long)(missing - absent));
    CHECK(one_of || !missing, "%ld units are missing without a fault", (long)missing);
    kvc_release(spill, units, KVC_TO_READ);
    for (int64_t i = 0; i < units->count; i++) pthread_rwlock_unlock(&users[layer * BLOCKS + units->runs[i].block]);
}

static void change_one(kvc_units units, kvc_use use) {
    const int block = units.runs[0].block, layer = units.layer, unit = layer * BLOCKS + block;
    units.count = 1;
    pthread_rwlock_wrlock(&users[unit]);
    const int64_t missing = kvc_hold(spill, &units, use);
    CHECK(!missing || use == KVC_TO_CHANGE, "a unit that is replaced is missing");
    if (missing) lost[unit] = 1;
    if (use == KVC_TO_REPLACE) lost[unit] = 0;
    if (!lost[unit]) memset(place_of(layer, block), ++changes[unit], sizes[layer]);
    kvc_release(spill, &units, use);
    pthread_rwlock_unlock(&users[unit]);
}

static void *call(void *context) {
    uint64_t state = (uint64_t)(uintptr_t)context * 977;
    for (int turn = 0; turn < TURNS; turn++) {
        kvc_run runs[MOST_HELD];
        const int count = 1 + (int)(next_random(&state) % MOST_HELD), first = (int)(next_random(&state) % (unsigned)(BLOCKS - count));
        for (int i = 0; i < count; i++) runs[i] = (kvc_run){first + i, 0, next_random(&state) % 2 ? 16 : 9};
        const kvc_units units = {.runs = runs, .count = count, .divisor = 1, .layer = (int32_t)(next_random(&state) % LAYERS)};
        const unsigned kind = (unsigned)(next_random(&state) % 10);
        if (kind < 5)
            read_some(&units);
        else if (kind < 9)
            change_one(units, kind < 7 ? KVC_TO_CHANGE : KVC_TO_REPLACE);
        else
            kvc_hold_ahead(spill, &units);
        if (turn % 64 == 0) kvc_spill_expect_room(spill);
    }
    return NULL;
}

static void run_round(int failing, int threads) {
    size_t total = 0;
    for (int layer = 0; layer < LAYERS; layer++) total += sizes[layer] * BLOCKS;
    FILE *file = tmpfile();
    arena = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(file && arena != MAP_FAILED, "no file or memory");
    memset(changes, 0, sizeof changes), memset(lost, 0, sizeof lost);
    one_of = failing;
    spill = kvc_spill_open(fileno(file), arena, LAYERS, sizes, BLOCKS, 16, total / 5, 4096, threads);
    CHECK(spill, "no memory");
    pthread_t callers[CALLERS];
    for (uintptr_t i = 0; i < CALLERS; i++) CHECK(!pthread_create(&callers[i], NULL, call, (void *)(i + 1)), "no thread");
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    one_of = 0;
    CHECK(!kvc_spill_expect_room(spill), "the file takes nothing more");
    kvc_run run = {0, 0, 9}; /* what was not written has left since */
    const kvc_units units = {.runs = &run, .count = 1, .divisor = 1};
    kvc_hold(spill, &units, KVC_TO_READ);
    kvc_release(spill, &units, KVC_TO_READ);
    const char *wrong = kvc_spill_check(spill);
    CHECK(!wrong, "%s", wrong);
    const kvc_spill_stats stats = kvc_spill_count(spill);
    CHECK(failing ? stats.faults > 0 : !stats.faults, "%ld faults", (long)stats.faults);
    printf("spill: %d threads, %s: %ld units held, %ld read, %ld written\n", threads, failing ? "faults" : "no faults",
           (long)stats.held_units, (long)stats.read_units, (long)stats.written_units);
    kvc_spill_close(spill);
    munmap(arena, total);
    fclose(file);
}

/* Fills the units of some blocks with a byte, one after another. */
static void fill(int first, int count, int byte) {
    for (int layer = 0; layer < LAYERS; layer++)
        for (int block = first; block < first + count; block++) {
            kvc_run run = {block, 0, 16};
            const kvc_units units = {.runs = &run, .count = 1, .divisor = 1, .layer = layer};
            CHECK(!kvc_hold(spill, &units, KVC_TO_REPLACE), "a unit that is replaced is missing");
            memset(place_of(layer, block), byte, sizes[layer]);
            kvc_release(spill, &units, KVC_TO_REPLACE);
        }
}

static void expect(int first, int count, int byte) {
    for (int layer = 0; layer < LAYERS; layer++)
        for (int block = first; block < first + count; block++) {
            kvc_run run = {block, 0, 16};
            const kvc_units units = {.runs = &run, .count = 1, .divisor = 1, .layer = layer};
            CHECK(!kvc_hold(spill, &units, KVC_TO_READ), "block %d is missing", block);
            for (size_t b = 0; b < sizes[layer]; b++) CHECK(place_of(layer, block)[b] == byte, "block %d has other bytes", block);
            kvc_release(spill, &units, KVC_TO_READ);
        }
}

static void wait_for_all(void) {
    pthread_mutex_lock(&spill->lock);
    while (spill->being_written && wait_for_one(spill)) continue;
    pthread_mutex_unlock(&spill->lock);
}

static size_t arena_bytes(void) {
    size_t total = 0;
    for (int layer = 0; layer < LAYERS; layer++) total += sizes[layer] * BLOCKS;
    return total;
}

/* A spill with a tenth of its blocks in memory, and its file on a disk of `pages` pages; a block takes one, one and three. */
static FILE *open_small_disk(int pages, int threads, const int32_t *references) {
    FILE *file = tmpfile();
    arena = mmap(NULL, arena_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(file && arena != MAP_FAILED, "no file or memory");
    memset(on_disk, 0, sizeof on_disk);
    pages_used = 0;
    most_pages = pages; /* less than MOST_PAGES: pages count */
    spill = kvc_spill_open(fileno(file), arena, LAYERS, sizes, BLOCKS, 16, arena_bytes() / 10, PAGE, threads);
    CHECK(spill, "no memory");
    kvc_spill_refer(spill, references);
    return file;
}

static void close_small_disk(FILE *file) {
    kvc_spill_close(spill);
    munmap(arena, arena_bytes());
    fclose(file);
    most_pages = MOST_PAGES;
}

/* Texts of a third of the blocks come and go, in turn over all blocks, on a disk with room for half of them. */
static void run_small_disk(int threads) {
    int32_t references[BLOCKS] = {0};
    const int text = BLOCKS / 3;
    FILE *file = open_small_disk(BLOCKS / 2 * 5, threads, references);
    for (int turn = 0; turn < 12; turn++) {
        const int first = turn % 3 * text;
        for (int block = 0; block < text; block++) references[first + block] = 1;
        fill(first, text, turn + 1);
        expect(first, text, turn + 1);
        CHECK(!kvc_spill_expect_room(spill), "the file takes nothing more");
        wait_for_all();
        for (int block = 0; block < text; block++) references[first + block] = 0;
        const char *wrong = kvc_spill_check(spill);
        CHECK(!wrong, "%s", wrong);
        CHECK(pages_used <= most_pages && spill->num_in_file * 5 >= pages_used, "%d pages of %d", (int)pages_used, (int)most_pages);
    }
    CHECK(!kvc_spill_count(spill).faults, "a fault");
    for (int block = 0; block < 2 * text; block++) references[block] = 1; /* they do not fit */
    fill(0, 2 * text, 77);
    wait_for_all();
    CHECK(kvc_spill_expect_room(spill) == ENOSPC, "the file takes more than the disk has");
    for (int block = text; block < 2 * text; block++) references[block] = 0;
    CHECK(!kvc_spill_expect_room(spill), "the file takes nothing more");
    expect(0, text, 77);
    wait_for_all();
    for (int block = 0; block < text; block++) references[block] = 0;
    kvc_spill_trim(spill, 0);
    CHECK(spill->num_in_file && pages_used, "it trims what is little");
    punch_spare(spill, 1);
    CHECK(!spill->num_in_file && !pages_used, "%d pages are of nobody", (int)pages_used);
    printf("spill: %d threads, a disk of %d pages, a file of %d: %ld written\n", threads, (int)most_pages, BLOCKS * 5, (long)kvc_spill_count(spill).written_units);
    close_small_disk(file);
}

/* A call counts what copies it needs by taking references off and back, while a thread finds the disk full: the thread leaves the
 * bytes of these blocks. The next call gives back those of a block that nobody has. */
static void run_counting_call(void) {
    int32_t references[BLOCKS] = {0};
    const int text = BLOCKS / 3;
    FILE *file = open_small_disk(MOST_PAGES - 1, 1, references);
    for (int block = 0; block < text + 8; block++) references[block] = 1;
    fill(0, text, 5);
    wait_for_all();
    for (int layer = 0; layer < LAYERS; layer++) CHECK(kvc_spill_state(spill, layer, 0) == 2, "block 0 is not in the file alone");
    most_pages = (int)pages_used;
    is_shut = 1;
    fill(text, 1, 6);
    references[0] = 0; /* the call counts */
    is_shut = 0;
    wait_for_all();
    references[0] = 1;
    expect(0, 1, 5);
    CHECK(spill->write_error == ENOSPC, "the disk is not full");
    fill(text + 1, 7, 6); /* more than half of what may be in memory */
    CHECK(kvc_spill_expect_room(spill) == ENOSPC, "there was room on a full disk");
    references[1] = 0;
    CHECK(!kvc_spill_expect_room(spill), "the file takes nothing more");
    wait_for_all();
    expect(text, 8, 6);
    CHECK(!kvc_spill_count(spill).faults, "a fault");
    close_small_disk(file);
    puts("spill: a call that counts while the disk is full");
}

int main(void) {
    for (int i = 0; i < LAYERS * BLOCKS; i++) pthread_rwlock_init(&users[i], NULL);
    for (int failing = 0; failing <= 40; failing += 40) {
        run_round(failing, 8);
        run_round(failing, 0); /* the callers serve themselves */
    }
    run_small_disk(0);
    run_small_disk(1);
    run_counting_call();
    return 0;
}
