/* kvc_threads.c - the pool of threads behind kvc_run_items.
 *
 * A caller takes idle workers by one compare-and-swap of a bitmap, posts its job to the line of each, runs items, takes
 * back what nobody has begun, waits for the others, and returns the workers by one OR. Between the bitmap and its last
 * look at a worker, that worker is the caller's, so that callers meet nowhere else, and no lock is held but to start
 * threads. The state of a worker:
 *
 *              post                begin                  leave
 *     FREE -----------> POSTED -----------> RUNNING ------------------> FREE
 *       ^                  |                   | the caller sleeps        ^
 *       '----- take back --'                   '--------> AWAITED --------' leave and wake the caller
 *
 * `begin`, `leave` are the worker's, the others its caller's. A worker that the system runs nowhere thus holds nothing: the
 * caller runs the items and takes the post back.
 *
 * The items of a job are divided into shares, one after another and one for each thread. A thread runs its own share from begin to
 * end: so it reads weights in their order, and in the next job, of the same items, it has the same ones. Then it helps
 * with the next share that is open. An item is run by the thread that counts `next` of its share up to it.
 *
 * A job lies on its caller's stack; workers touch it from `begin` to `leave`. A worker without a job spins on its line, then
 * sleeps on `sleeping`. It says so in `asleep` before it looks at its state for the last time, and a caller posts before it
 * looks at `asleep`: one of them sees the other. Both are read-modify-writes of one word, so that one is the later.
 */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_getcpu, sched_getaffinity */
#else
#define _POSIX_C_SOURCE 200809L
#define _DARWIN_C_SOURCE /* _SC_NPROCESSORS_ONLN */
#endif

#include "kvc_system.h"

#include "kvc_threads.h"
#include "kvc_sleep.h"

#include <pthread.h>
#if defined(__APPLE__)
#include <pthread/qos.h>
#endif
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#if defined(__linux__)
#include <sys/resource.h>
#endif
#include <time.h>

enum {
    GROUP = 64, /* workers of a bitmap */
    MAX_GROUPS = 16,
    MAX_WORKERS = 1023,
    MAX_SHARES = 16, /* more threads have one for several: a job lies on the stack */
    STACK_BYTES = 1 << 21, /* kernels use less than 128 KiB, under the sanitizers several times that */
    /* How long a thread spins before it sleeps: longer than a network needs in Python from one product to the next, 10 to
     * 60 us. Waking takes 5 to 50 us. A network of torch needs up to 300 us: a worker spins so long if that would have been
     * enough for the last pause that was longer than SPIN_NS. Else it would keep torch's threads from its core. */
    SPIN_NS = 100000,
    LONG_SPIN_NS = 400000,
    SHORT_SPIN_NS = 20000, /* where another thread was given the core within CROWDED_NS, or a quota counts its time */
    CROWDED_NS = 10000000,
    SPINS_PER_CHECK = 16, /* pauses between two looks at the clock, which cost 20 ns each */
    MANY_SLEEPERS = 4,    /* a caller that wakes more leaves it to the woken ones, 2 each: one takes it 1 to 5 us */
#if defined(KVC_SHARE_ALL) /* for tests */
    SPUN_SHARE_NS = 1,
    WOKEN_SHARE_NS = 2,
#else
    /* The least work of each thread: several times the cost of handing it to a worker that spins (below 1 us), or that will
     * spin from now on; ... */
    SPUN_SHARE_NS = 5000,
    WOKEN_SHARE_NS = 25000, /* ... or of waking one, for this call alone */
#endif
};

/* How the CPU rounds, and whether denormals are zeros. A helper takes it from the caller: bits do not depend on threads. */
#if defined(__x86_64__)
typedef unsigned float_mode;
static float_mode get_mode(void) { return __builtin_ia32_stmxcsr(); }
static void set_mode(float_mode mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
typedef uint64_t float_mode;
static float_mode get_mode(void) {
    float_mode mode;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void set_mode(float_mode mode) { __asm__ __volatile__("msr fpcr, %0" : : "r"(mode)); }
#else
typedef int float_mode;
static float_mode get_mode(void) { return 0; }
static void set_mode(float_mode mode) { (void)mode; }
#endif

typedef struct share { /* on a line of its own: several threads may write it */
    _Alignas(64) _Atomic int64_t next;
    int64_t stop;
} share;

typedef struct job {
    kvc_item_fn *item;
    void *context;
    int64_t count;
    float_mode mode; /* of the caller */
    int num_shares;
    _Alignas(64) _Atomic uint64_t open; /* shares that may have items that nobody has begun: a bit each */
    share shares[MAX_SHARES];
} job;

enum { FREE, POSTED, RUNNING, AWAITED };

typedef struct worker { /* a line of its own */
    _Alignas(64) atomic_uint state;
    atomic_uint sleeping; /* 1: it sleeps on this word, or is about to */
    job *job;
    int thread;
    int wakes[2];   /* workers that it wakes before its first item; -1: none */
    atomic_int cpu; /* of its caller */
} worker;

typedef struct group { /* bitmaps of 64 workers */
    _Alignas(64) _Atomic uint64_t idle; /* nobody's */
    _Atomic uint64_t asleep;            /* the caller that posts wakes them; others spin */
} group;

typedef struct team { /* the workers of a caller, by groups */
    uint64_t members[MAX_GROUPS], sleepers[MAX_GROUPS];
    int size, groups;
} team;

/* Picoseconds of a unit on one thread: at first a round number of what machines need, then an average of what calls took.
 * A call counts at most twice and at least half of it, so that a thread which was held back spoils nothing. */
static const int first_paces[KVC_NUM_WORKS] = {
    [KVC_READING] = 80, [KVC_MULTIPLYING] = 16, [KVC_ATTENDING] = 16,
    [KVC_WRITING] = 2000, [KVC_COMPUTING] = 300, [KVC_SCANNING] = 160,
};
static atomic_int paces[KVC_NUM_WORKS]; /* beyond the first one */
enum {
    PACE_BITS = 4,           /* it stays within 2**4 of the first one */
    PACE_SHIFT = 3,          /* a call has an eighth of its weight */
    LEAST_MEASURED_NS = 500, /* shorter ones are the clock's */
};

static worker workers[MAX_WORKERS];
static kvc_bed beds[MAX_WORKERS];
static group all[MAX_GROUPS];
static atomic_int num_workers;
static atomic_int num_callers; /* that want helpers. They share the threads: one gets what others leave of its number */
static atomic_int frugal; /* a quota counts the time of CPUs */
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Whether the word was `value` within `ns`. */
static int spin_until(atomic_uint *word, unsigned value, int64_t ns) {
    for (int64_t end = now_ns() + ns;;) {
        for (int i = 0; i < SPINS_PER_CHECK; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) == value) return 1;
            pause_briefly();
        }
        if (now_ns() >= end) return atomic_load(word) == value;
    }
}

static int this_cpu(void) {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

/* A thread that sleeps is often woken on the core of its waker, and both then share it for milliseconds while another
 * core is idle. A moment without permission to run there moves it. */
static void leave_cpu(int cpu) {
#if defined(__linux__)
    cpu_set_t allowed, others;
    if (cpu < 0 || sched_getcpu() != cpu || sched_getaffinity(0, sizeof allowed, &allowed)) return;
    others = allowed;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) && sched_setaffinity(0, sizeof others, &others) == 0)
        sched_setaffinity(0, sizeof allowed, &allowed);
#else
    (void)cpu;
#endif
}

/* Divides the items among `threads` threads. The first share is the caller's, and is not counted. */
static void divide(job *j, int threads) {
    const int most = j->count < MAX_SHARES ? (int)j->count : MAX_SHARES, n = threads < most ? threads : most;
    for (int s = 0; s < n; s++) {
        atomic_init(&j->shares[s].next, s ? j->count * s / n : 1);
        j->shares[s].stop = j->count * (s + 1) / n;
    }
    atomic_init(&j->open, ((uint64_t)1 << n) - 1);
    j->num_shares = n;
}

/* Runs items, those of the thread's own share first; how many. */
static int64_t run(job *j, int thread) {
    int64_t count = 0;
    uint64_t open, own = (uint64_t)1 << thread % j->num_shares;
    while ((open = atomic_load_explicit(&j->open, memory_order_relaxed))) {
        const uint64_t behind = open & -own;
        share *s = &j->shares[__builtin_ctzll(behind ? behind : open)];
        for (int64_t index; (index = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed)) < s->stop; count++)
            j->item(j->context, index, thread);
        own = (uint64_t)1 << (s - j->shares);
        atomic_fetch_and_explicit(&j->open, ~own, memory_order_relaxed);
    }
    return count;
}

/* ---- Workers. */

/* Wakes a worker that sleeps, or is about to. Whoever clears its bit wakes it. */
static void wake(int index) {
    worker *w = &workers[index];
    atomic_fetch_and(&all[index / GROUP].asleep, ~((uint64_t)1 << index % GROUP));
    if (atomic_exchange(&w->sleeping, 0)) kvc_wake(&w->sleeping, &beds[index]);
}

static void sleep_until_posted(worker *w) {
    const int index = (int)(w - workers);
    const uint64_t bit = (uint64_t)1 << index % GROUP;
    atomic_store(&w->sleeping, 1);
    atomic_fetch_or(&all[index / GROUP].asleep, bit);
    if (atomic_load(&w->state) != POSTED) kvc_sleep_while(&w->sleeping, 1, &beds[index]);
    atomic_store(&w->sleeping, 0);
    atomic_fetch_and(&all[index / GROUP].asleep, ~bit);
    if (atomic_load(&w->state) == POSTED) leave_cpu(atomic_load_explicit(&w->cpu, memory_order_relaxed));
}

typedef struct habit { /* of a worker that waits */
    int64_t spin_ns;   /* how long it spins */
    int64_t crowded;   /* until then others want its core */
    long times_pushed; /* off its core, since it began */
} habit;

/* How often the system took the core of this thread for another one. */
static long times_pushed(void) {
#if defined(__linux__)
    struct rusage use;
    if (getrusage(RUSAGE_THREAD, &use) == 0) return use.ru_nivcsw;
#endif
    return 0;
}

/* Whether a job was posted before the time to sleep. On a crowded core that is soon. */
static int spin_until_posted(worker *w, habit *h) {
    if (spin_until(&w->state, POSTED, SHORT_SPIN_NS)) return 1;
    const long pushed = times_pushed();
    const int64_t now = now_ns();
    if (pushed > h->times_pushed) h->times_pushed = pushed, h->crowded = now + CROWDED_NS;
    if (now < h->crowded || atomic_load_explicit(&frugal, memory_order_relaxed)) return 0;
    return spin_until(&w->state, POSTED, h->spin_ns - SHORT_SPIN_NS);
}

/* Spins and sleeps until a job has begun. */
static void begin(worker *w, habit *h) {
    const int64_t start = now_ns();
    for (unsigned posted;;) {
        if (!spin_until_posted(w, h)) sleep_until_posted(w);
        posted = POSTED;
        if (atomic_compare_exchange_strong(&w->state, &posted, RUNNING)) break;
    }
    const int64_t pause = now_ns() - start;
    if (pause > SPIN_NS) h->spin_ns = pause < LONG_SPIN_NS ? LONG_SPIN_NS : SPIN_NS;
}

static void *work(void *argument) {
    worker *w = argument;
    habit h = {.spin_ns = SPIN_NS};
#if defined(__APPLE__)
    pthread_set_qos_class_self_np(QOS_CLASS_USER_INTERACTIVE, 0); /* else macOS may run it on an efficiency core */
#endif
    for (;;) {
        begin(w, &h);
        for (int i = 0; i < 2 && w->wakes[i] >= 0; i++) wake(w->wakes[i]);
        job *j = w->job;
        set_mode(j->mode);
        run(j, w->thread);
        if (atomic_exchange(&w->state, FREE) == AWAITED) kvc_wake(&w->state, &beds[w - workers]);
    }
    return NULL;
}

/* ---- Forks. The child has one thread: the pool begins anew. Windows has none. */

#if !defined(_WIN32)
static void before_fork(void) { pthread_mutex_lock(&starting); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&starting); }
static void after_fork_in_child(void) {
    for (int i = 0; i < MAX_GROUPS; i++) atomic_store(&all[i].idle, 0), atomic_store(&all[i].asleep, 0);
    for (int i = atomic_load(&num_workers); i > 0; i--) {
        atomic_store(&workers[i - 1].state, FREE), atomic_store(&workers[i - 1].sleeping, 0);
        kvc_make_bed(&beds[i - 1]);
    }
    atomic_store(&num_workers, 0), atomic_store(&num_callers, 0);
    pthread_mutex_unlock(&starting); /* of this thread, which has forked */
}
#endif
/* Before the first job: it must not wait with `starting` held, since a fork waits for it. */
__attribute__((constructor)) static void begin_pool(void) {
    for (int i = 0; i < MAX_WORKERS; i++) kvc_make_bed(&beds[i]);
#if !defined(_WIN32)
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
#endif
}

/* ---- Callers. */

static int num_groups(void) { return (atomic_load_explicit(&num_workers, memory_order_acquire) + GROUP - 1) / GROUP; }

static int num_busy(void) {
    int count = atomic_load_explicit(&num_workers, memory_order_acquire);
    for (int g = num_groups() - 1; g >= 0; g--)
        count -= __builtin_popcountll(atomic_load_explicit(&all[g].idle, memory_order_relaxed));
    return count;
}

/* The lowest `count` bits. */
static uint64_t lowest(uint64_t bits, int count) {
    uint64_t rest = bits;
    if (__builtin_popcountll(bits) <= count) return bits;
    while (count-- > 0) rest &= rest - 1;
    return bits & ~rest;
}

/* Takes idle workers until the team has `wanted`, those that spin first. */
static void take(team *t, int wanted) {
    for (int g = 0; g < t->groups; g++) {
        t->members[g] = 0;
        uint64_t idle = atomic_load_explicit(&all[g].idle, memory_order_relaxed), mine, asleep;
        do {
            asleep = atomic_load_explicit(&all[g].asleep, memory_order_relaxed);
            mine = lowest(idle & ~asleep, wanted - t->size);
            mine |= lowest(idle & asleep, wanted - t->size - __builtin_popcountll(mine));
        } while (mine && !atomic_compare_exchange_weak(&all[g].idle, &idle, idle & ~mine));
        t->members[g] = mine, t->sleepers[g] = mine & asleep;
        t->size += __builtin_popcountll(mine);
    }
}

/* Starts threads for a team that has fewer than `wanted`: `most` in all, as far as the system allows. They take no signals,
 * which are for threads of Python. */
static void start_workers(team *t, int wanted, int most) {
    pthread_attr_t detached;
    kvc_signals before;
    if (atomic_load(&num_workers) >= most) return;
    pthread_mutex_lock(&starting);
    int count = atomic_load(&num_workers);
    if (most > count + wanted - t->size) most = count + wanted - t->size;
    if (count < most && !pthread_attr_init(&detached)) {
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&detached, STACK_BYTES);
        kvc_block_signals(&before);
        for (pthread_t thread; count < most && !pthread_create(&thread, &detached, work, &workers[count]); count++) {
            for (; t->groups <= count / GROUP; t->groups++) t->members[t->groups] = t->sleepers[t->groups] = 0;
            t->members[count / GROUP] |= (uint64_t)1 << count % GROUP, t->size++;
        }
        kvc_allow_signals(&before);
        pthread_attr_destroy(&detached);
        atomic_store(&num_workers, count);
    }
    pthread_mutex_unlock(&starting);
}

/* Removes the lowest bit, and says which it was. */
static int next_bit(uint64_t *bits) {
    const int bit = __builtin_ctzll(*bits);
    *bits &= *bits - 1;
    return bit;
}

/* Posts the job to all of the team, and wakes those that sleep. Of many sleepers the caller wakes two, and sleeper i wakes
 * sleepers 2 i + 2 and 2 i + 3. */
static void post(const team *t, job *j) {
    int thread = 0, sleepers[MAX_WORKERS], count = 0, seen = 0;
    const int cpu = this_cpu();
    for (int g = 0; g < t->groups; g++) {
        for (uint64_t rest = t->sleepers[g]; rest;) sleepers[count++] = g * GROUP + next_bit(&rest);
    }
    const int many = count > MANY_SLEEPERS;
    for (int g = 0; g < t->groups; g++) {
        for (uint64_t rest = t->members[g]; rest;) {
            const int bit = next_bit(&rest), sleeper = t->sleepers[g] >> bit & 1;
            worker *w = &workers[g * GROUP + bit];
            for (int i = 0; i < 2; i++) {
                const int next = 2 * seen + 2 + i;
                w->wakes[i] = many && sleeper && next < count ? sleepers[next] : -1;
            }
            seen += sleeper;
            w->job = j, w->thread = ++thread;
            atomic_store_explicit(&w->cpu, cpu, memory_order_relaxed);
            atomic_store_explicit(&w->state, POSTED, memory_order_release);
        }
    }
    for (int g = 0; g < t->groups; g++) { /* those that fell asleep in between */
        uint64_t late = t->members[g] ? atomic_fetch_or(&all[g].asleep, 0) & t->members[g] & ~t->sleepers[g] : 0;
        while (late) wake(g * GROUP + next_bit(&late));
    }
    for (int i = 0; i < count && i < (many ? 2 : count); i++) wake(sleepers[i]);
}

/* Takes back the posts that nobody has begun, waits for the others, and returns the team. */
static void dismiss(const team *t) {
    uint64_t running[MAX_GROUPS];
    for (int g = 0; g < t->groups; g++) {
        running[g] = 0;
        for (uint64_t rest = t->members[g]; rest;) {
            const int bit = next_bit(&rest);
            unsigned posted = POSTED;
            if (atomic_load(&workers[g * GROUP + bit].state) != POSTED ||
                !atomic_compare_exchange_strong(&workers[g * GROUP + bit].state, &posted, FREE))
                running[g] |= (uint64_t)1 << bit;
        }
    }
    for (int g = 0; g < t->groups; g++) {
        for (uint64_t rest = running[g]; rest;) {
            const int index = g * GROUP + next_bit(&rest);
            unsigned state = RUNNING;
            if (spin_until(&workers[index].state, FREE, atomic_load(&frugal) ? SHORT_SPIN_NS : SPIN_NS)) continue;
            if (atomic_compare_exchange_strong(&workers[index].state, &state, AWAITED))
                kvc_sleep_while(&workers[index].state, AWAITED, &beds[index]);
        }
        if (t->members[g]) atomic_fetch_or(&all[g].idle, t->members[g]);
    }
}

/* Runs a job with its caller and helpers. Returns how many items the caller ran; sets how long that took. */
static int64_t run_with_helpers(job *j, int num_threads, int64_t *ns) {
    const int most = num_threads - 1 < MAX_WORKERS ? num_threads - 1 : MAX_WORKERS;
    int helpers = j->count - 1 < most ? (int)j->count - 1 : most;
    team t = {.size = 0, .groups = 0};
    if (helpers > 0) {
        const int rest = most - atomic_fetch_add(&num_callers, 1) - num_busy();
        if (rest > 0) {
            helpers = helpers < rest ? helpers : rest;
            j->mode = get_mode();
            t.groups = num_groups();
            take(&t, helpers);
            if (t.size < helpers) start_workers(&t, helpers, most);
        }
    }
    divide(j, t.size + 1);
    if (t.size) post(&t, j);
    const int64_t start = ns ? now_ns() : 0;
    int64_t count = 0;
    if (j->count > 0) j->item(j->context, 0, 0), count = 1 + run(j, 0);
    if (ns) *ns = now_ns() - start;
    if (helpers > 0) atomic_fetch_sub(&num_callers, 1);
    if (t.size) dismiss(&t);
    return count;
}

void kvc_run_items(int64_t count, int num_threads, kvc_item_fn *item, void *context) {
    job j = {.item = item, .context = context, .count = count};
    run_with_helpers(&j, num_threads, NULL);
}

static int64_t pace_of(kvc_work work) {
    return first_paces[work] + atomic_load_explicit(&paces[work], memory_order_relaxed);
}

/* Moves the pace towards what a unit took on one thread, in picoseconds. */
static void learn(kvc_work work, double taken) {
    const int64_t pace = pace_of(work), least = first_paces[work] >> PACE_BITS, most = first_paces[work] << PACE_BITS;
    const int64_t found = taken < (double)pace / 2 ? pace / 2 : taken > 2 * (double)pace ? 2 * pace : (int64_t)taken;
    const int64_t step = found - pace, change = step / (1 << PACE_SHIFT);
    const int64_t next = pace + (change ? change : (step > 0) - (step < 0));
    const int64_t bounded = next < least ? least : next > most ? most : next;
    atomic_store_explicit(&paces[work], (int)(bounded - first_paces[work]), memory_order_relaxed);
}

void kvc_run_work(kvc_work work, int64_t units, int64_t count, int num_threads, kvc_item_fn *item, void *context) {
    job j = {.item = item, .context = context, .count = count};
    int64_t ns;
    const int64_t own = run_with_helpers(&j, num_threads, &ns);
    if (own > 0 && units > 0 && ns >= LEAST_MEASURED_NS)
        learn(work, (double)ns * 1000 * ((double)count / (double)own) / (double)units);
}

int kvc_threads_worth(kvc_work work, int64_t units, int num_threads) {
    static _Thread_local int64_t last;
    const int64_t ns = units < INT64_MAX / 100000 ? units * pace_of(work) / 1000 : INT64_MAX / 100000;
    const int64_t woken = ns / WOKEN_SHARE_NS, spun = ns / SPUN_SHARE_NS;
    if (num_threads == 1 || spun < 2) return 1;
    const int64_t now = now_ns(), pause = now - last;
    last = now;
    if (woken >= num_threads) return num_threads;
    if (pause < SPIN_NS) return spun < num_threads ? (int)spun : num_threads; /* the next call finds woken workers too */
    int64_t most = 1;
    for (int g = num_groups() - 1; g >= 0; g--) {
        const uint64_t asleep = atomic_load_explicit(&all[g].asleep, memory_order_relaxed);
        most += __builtin_popcountll(atomic_load_explicit(&all[g].idle, memory_order_relaxed) & ~asleep);
    }
    if (most > spun) most = spun;
    if (most < woken) most = woken;
    return most < 1 ? 1 : most < num_threads ? (int)most : num_threads;
}

void kvc_spin_little(int little) { atomic_store(&frugal, little); }
