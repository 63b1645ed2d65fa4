/* pool.c - the pool of threads by itself: what `run pool` runs, as it is, with conditions in place of futexes, and under
 * ThreadSanitizer. It includes the pool, to see its words, and counts its calls of the system.
 *
 * A worker that the system holds back is one without a thread: the pool knows it as idle, and it never begins.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_long futex_calls;
#define syscall(number, ...) (atomic_fetch_add(&futex_calls, 1), syscall(number, __VA_ARGS__))

#include "kvc_threads.c"

enum { MOST_ITEMS = 500, THREADS = 16, CALLERS = 5, JOBS = 300, PATIENCE = 120 /* seconds */ };

#define CHECK(true, ...) ((true) ? (void)0 : (fprintf(stderr, "pool.c:%d: ", __LINE__), fprintf(stderr, __VA_ARGS__), \
                                              fputc('\n', stderr), abort()))

static uint64_t next_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* The pool after a call, when no other call runs: all are free, and nobody's. */
static void check_idle(void) {
    const int count = atomic_load(&num_workers);
    for (int i = 0; i < count; i++) {
        CHECK(atomic_load(&workers[i].state) == FREE, "worker %d of %d is in state %u", i, count, atomic_load(&workers[i].state));
        CHECK(atomic_load(&all[i / GROUP].idle) >> i % GROUP & 1, "worker %d of %d is not idle", i, count);
    }
}

/* ---- Every item runs once, item 0 on the caller, and no two at once have the same thread. */

typedef struct record {
    pthread_t caller;
    int num_threads, work, slow;
    atomic_int times[MOST_ITEMS], inside[THREADS + 1], helped;
} record;

static void note(void *context, int64_t index, int thread) {
    record *r = context;
    CHECK(thread >= 0 && thread < (r->num_threads > 1 ? r->num_threads : 1), "thread %d of %d", thread, r->num_threads);
    CHECK(atomic_fetch_add(&r->inside[thread], 1) == 0, "two items at once on thread %d", thread);
    CHECK((thread == 0) == pthread_equal(pthread_self(), r->caller), "thread %d is another one", thread);
    CHECK(index || !thread, "item 0 on thread %d", thread);
    if (thread) {
        sigset_t blocked;
        pthread_sigmask(SIG_BLOCK, NULL, &blocked);
        CHECK(sigismember(&blocked, SIGINT) && sigismember(&blocked, SIGTERM), "a worker takes signals");
        atomic_store(&r->helped, 1);
    }
    for (volatile int i = r->work; i > 0;) i = i - 1;
    if (r->slow && index % 7 == 3) usleep(300); /* a caller that waits for it sleeps */
    atomic_fetch_add(&r->times[index], 1);
    atomic_fetch_sub(&r->inside[thread], 1);
}

static int run_noted(int count, int num_threads, int work, int slow) {
    record *r = calloc(1, sizeof *r);
    r->caller = pthread_self(), r->num_threads = num_threads, r->work = work, r->slow = slow;
    kvc_run_items(count, num_threads, note, r);
    for (int i = 0; i < count; i++) CHECK(atomic_load(&r->times[i]) == 1, "item %d ran %d times", i, atomic_load(&r->times[i]));
    const int helped = atomic_load(&r->helped);
    free(r);
    return helped;
}

/* ---- Shares: a thread runs the items of its own in their order, then those of the next threads that are left. */

typedef struct order {
    int64_t items[MOST_ITEMS];
    int count;
} order;

static void note_order(void *context, int64_t index, int thread) {
    order *o = context;
    (void)thread;
    o->items[o->count++] = index;
}

static void run_shares(void) {
    for (int count = 1; count < 50; count++) {
        for (int threads = 1; threads <= 20; threads++) {
            order o = {.count = 0};
            job j = {.item = note_order, .context = &o, .count = count};
            divide(&j, threads);
            const int most = count < MAX_SHARES ? count : MAX_SHARES, shares = threads < most ? threads : most;
            const int thread = (7 * count) % threads, own = thread % shares;
            CHECK(run(&j, thread) == count - 1, "%d threads ran other than %d items", threads, count - 1);
            for (int i = 0, at = 0; i < shares; i++) {
                const int s = (own + i) % shares;
                for (int64_t item = s ? count * s / shares : 1; item < count * (s + 1) / shares; item++, at++)
                    CHECK(o.items[at] == item, "of %d items for %d threads, %d. is %d", count, threads, at, (int)o.items[at]);
            }
            CHECK(run(&j, 0) == 0 && o.count == count - 1, "items run twice");
        }
    }
}

static void *call_often(void *seed) {
    uint64_t state = (uint64_t)(uintptr_t)seed;
    for (int i = 0; i < JOBS; i++) {
        const int count = (int)(next_random(&state) % 4 ? next_random(&state) % 40 : next_random(&state) % MOST_ITEMS);
        run_noted(count, 1 + (int)(next_random(&state) % THREADS), (int)(next_random(&state) % 2000), next_random(&state) % 20 == 0);
        if (next_random(&state) % 30 == 0) usleep(1000); /* workers fall asleep */
    }
    return NULL;
}

static void call_from_many(void) {
    pthread_t callers[CALLERS];
    for (uintptr_t i = 0; i < CALLERS; i++) pthread_create(&callers[i], NULL, call_often, (void *)(i + 1));
    for (int i = 0; i < CALLERS; i++) pthread_join(callers[i], NULL);
    check_idle();
    CHECK(atomic_load(&num_workers) < THREADS, "%d workers for calls of %d threads", atomic_load(&num_workers), THREADS);
    CHECK(atomic_load(&num_callers) == 0, "%d callers are left", atomic_load(&num_callers));
}

/* ---- All workers sleep; each begins, though its caller wakes but two: the items wait for one another. */

static void meet(void *context, int64_t index, int thread) {
    atomic_int *left = context;
    (void)index, (void)thread;
    for (atomic_fetch_sub(left, 1); atomic_load(left) > 0;) usleep(100);
}

static int num_asleep(void) {
    int count = 0;
    for (int g = 0; g < MAX_GROUPS; g++) count += __builtin_popcountll(atomic_load(&all[g].asleep));
    return count;
}

static void wake_all(int threads) {
    for (int i = 0; i < 20; i++) {
        atomic_int left = threads;
        while (i % 2 && num_asleep() < atomic_load(&num_workers)) usleep(500);
        kvc_run_items(threads, threads, meet, &left);
    }
    check_idle();
}

typedef struct affinity {
    cpu_set_t caller;
    atomic_int differs;
} affinity;

static void compare_affinity(void *context, int64_t index, int thread) {
    affinity *a = context;
    cpu_set_t mine;
    (void)index, (void)thread;
    if (sched_getaffinity(0, sizeof mine, &mine) || !CPU_EQUAL(&mine, &a->caller)) atomic_store(&a->differs, 1);
    usleep(50);
}

/* A worker that left the CPU of its waker may run everywhere again. */
static void keep_affinity(void) {
    affinity a = {.differs = 0};
    sched_getaffinity(0, sizeof a.caller, &a.caller);
    for (int i = 0; i < 20; i++) {
        kvc_run_items(THREADS, THREADS, compare_affinity, &a);
        usleep(1000);
    }
    CHECK(!atomic_load(&a.differs), "a worker has other CPUs than its caller");
}

/* ---- Forks. */

static void in_child(void (*test)(void)) {
    const pid_t child = fork();
    CHECK(child >= 0, "no fork");
    if (child == 0) {
        alarm(PATIENCE);
        test();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(status == 0, "the child ended with status %d", status);
}

static void run_in_child(void) {
    CHECK(atomic_load(&num_workers) == 0, "%d workers in the child", atomic_load(&num_workers));
    int helped = 0;
    for (int i = 0; i < 10000 && !(helped && i >= 20); i++) helped |= run_noted(64, 4, 5000, 0);
    CHECK(helped, "no worker of the child helps");
    check_idle();
}

static atomic_int stopped;
static void *call_until_stopped(void *unused) {
    while (!atomic_load(&stopped)) run_noted(30, 3, 1000, 0);
    return unused;
}

static void fork_beside_calls(void) {
    pthread_t caller;
    pthread_create(&caller, NULL, call_until_stopped, NULL);
    for (int i = 0; i < 10; i++) in_child(run_in_child);
    atomic_store(&stopped, 1);
    pthread_join(caller, NULL);
    check_idle();
}

/* ---- Workers that are held back, in a child whose pool is empty. */

static void add_held_back(int count, int asleep) {
    CHECK(atomic_load(&num_workers) == 0, "the pool is not empty");
    for (int i = 0; i < count; i++) {
        atomic_fetch_or(&all[i / GROUP].idle, (uint64_t)1 << i % GROUP);
        if (asleep) atomic_store(&workers[i].sleeping, 1), atomic_fetch_or(&all[i / GROUP].asleep, (uint64_t)1 << i % GROUP);
    }
    atomic_store(&num_workers, count);
}

/* They hold no job, and cost no call of the system. */
static void run_beside_held_back(void) {
    add_held_back(100, 0);
    const long before = atomic_load(&futex_calls);
    for (int i = 0; i < 50; i++) {
        CHECK(!run_noted(200, 101, 10, 0), "a worker without a thread helped");
        check_idle();
    }
    CHECK(atomic_load(&futex_calls) == before, "%ld calls of the system", atomic_load(&futex_calls) - before);
}

/* A caller wakes few sleepers itself; those that fell asleep are woken in the next job again. */
static void wake_few(int sleepers, int expected) {
    add_held_back(sleepers, 1);
    const long before = atomic_load(&futex_calls);
    run_noted(200, sleepers + 1, 10, 0);
    check_idle();
#if !defined(KVC_NO_FUTEX)
    CHECK(atomic_load(&futex_calls) - before == expected, "%ld wakes, not %d", atomic_load(&futex_calls) - before, expected);
#else
    (void)before;
#endif
    CHECK(num_asleep() == sleepers - expected, "%d of %d still asleep", num_asleep(), sleepers);
}
static void wake_four(void) { wake_few(4, 4); }
static void wake_two_of_many(void) { wake_few(90, 2); }

/* A caller takes workers that spin first. */
static void take_awake(void) {
    add_held_back(70, 1);
    atomic_store(&all[0].asleep, ~((uint64_t)1 << 40));
    const long before = atomic_load(&futex_calls);
    run_noted(50, 2, 10, 0);
    CHECK(atomic_load(&futex_calls) == before, "a sleeper was woken beside one that spins");
}

static void take_note_of_team(void *context, int64_t index, int thread) {
    (void)thread;
    if (index == 0) atomic_store((atomic_int *)context, __builtin_popcountll(0x3f & ~atomic_load(&all[0].idle)));
}

/* A caller that comes while others run gets what these leave of its number. */
static void share_threads(void) {
    add_held_back(10, 0);
    atomic_store(&num_callers, 2), atomic_store(&all[0].idle, 0x3f); /* two callers and four workers are busy */
    atomic_int left = 1;
    kvc_run_items(20, 8, take_note_of_team, &left);
    CHECK(atomic_load(&left) == 7 - 2 - 4, "a caller had %d of 7 helpers beside 6 threads", atomic_load(&left));
    atomic_store(&left, 1);
    kvc_run_items(20, 7, take_note_of_team, &left);
    CHECK(atomic_load(&left) == 0, "a caller had %d of 6 helpers beside 6 threads", atomic_load(&left));
}

/* ---- Threads by the time of the work. */

/* For a job of `ns` nanoseconds. */
static int worth(int64_t ns, int num_threads) {
    return kvc_threads_worth(KVC_WRITING, (ns * 1000 + first_paces[KVC_WRITING] - 1) / first_paces[KVC_WRITING], num_threads);
}

static void choose_threads(void) {
    CHECK(kvc_threads_worth(KVC_READING, 0, 8) == 1 && worth(SPUN_SHARE_NS, 8) == 1, "threads without work");
    CHECK(kvc_threads_worth(KVC_READING, INT64_MAX, 8) == 8 && worth(1000000000, 1) == 1, "too few threads");
    for (int64_t ns = 1; ns < 10000000; ns += ns / 3 + 1) {
        const int64_t n = worth(ns, 8), least = ns / WOKEN_SHARE_NS, most = (ns + 1) / SPUN_SHARE_NS;
        CHECK(n >= 1 && n <= 8 && (n >= least || n == 8) && (n <= most || n == 1), "%d threads for %d ns", (int)n, (int)ns);
    }
}

static void sleep_long(void *context, int64_t index, int thread) {
    (void)context, (void)index, (void)thread;
    usleep(1000);
}
static void do_nothing(void *context, int64_t index, int thread) { (void)context, (void)index, (void)thread; }

/* What a unit takes is learned, within bounds, and of the kind of work that ran alone. */
static void learn_paces(void) {
    const int first = first_paces[KVC_MULTIPLYING];
    for (int i = 0; i < 200; i++) kvc_run_work(KVC_MULTIPLYING, 1, 2, 1, sleep_long, NULL);
    CHECK(pace_of(KVC_MULTIPLYING) == first << PACE_BITS, "a pace of %d", (int)pace_of(KVC_MULTIPLYING));
    for (int i = 0; i < 200; i++) kvc_run_work(KVC_MULTIPLYING, (int64_t)1 << 50, 5000, 3, do_nothing, NULL);
    CHECK(pace_of(KVC_MULTIPLYING) == first >> PACE_BITS, "a pace of %d", (int)pace_of(KVC_MULTIPLYING));
    kvc_run_work(KVC_MULTIPLYING, 0, 0, 3, do_nothing, NULL);
    CHECK(pace_of(KVC_MULTIPLYING) == first >> PACE_BITS, "no work has a pace");
    CHECK(pace_of(KVC_READING) == first_paces[KVC_READING], "another kind learned");
}
/* One call alone wakes nobody for little; helpers that spin are worth more. */
static void choose_awake(void) {
    CHECK(worth(WOKEN_SHARE_NS, 8) == 1, "a sleeper is woken for one share");
    usleep(10000);
    add_held_back(70, 1);
    CHECK(worth(WOKEN_SHARE_NS, 8) == 1, "a sleeper is woken for one share");
    usleep(10000);
    atomic_store(&all[0].asleep, ~(uint64_t)3);
    CHECK(worth(WOKEN_SHARE_NS, 8) == 3, "two spin");
}

int main(void) {
    alarm(PATIENCE);
    for (int i = 0; i < 40; i++) run_noted(i, 1 + i % 5, 100, 0);
    run_shares();
    in_child(run_beside_held_back);
    in_child(wake_four);
    in_child(wake_two_of_many);
    in_child(take_awake);
    in_child(choose_threads);
    in_child(choose_awake);
    in_child(learn_paces);
    wake_all(THREADS);
    keep_affinity();
    call_from_many();
    fork_beside_calls();
    kvc_spin_little(1);
    call_from_many();
    in_child(share_threads);
    wake_all(80);
    printf("pool: %d workers, %ld calls of the system, no failure\n", atomic_load(&num_workers), atomic_load(&futex_calls));
    return 0;
}
