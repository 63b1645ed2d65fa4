/* kvc_threads.c - the pool of threads behind kvc_run_items.
 *
 *   caller    post a job -> run its items -> withdraw it -> wait until its helpers have left it
 *   worker    wait for a job that wants helpers -> join it -> run its items -> leave it
 *
 * An item is run by the thread that counts `next` up to it. A job lies on its caller's stack: workers join and leave it
 * under the lock of the pool, and touch it at no other time but for its items.
 */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_getcpu, sched_getaffinity */
#else
#define _POSIX_C_SOURCE 200809L
#define _DARWIN_C_SOURCE /* _SC_NPROCESSORS_ONLN */
#endif

#include "kvc_threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_WORKERS = 1023,
    STACK_BYTES = 1 << 21, /* kernels use less than 128 KiB, under the sanitizers several times that */
    /* How long a thread spins before it sleeps: longer than a network needs in Python from one product to the next, 10 to
     * 60 us. Waking takes 5 to 50 us. A network of torch needs up to 300 us: a worker spins so long if that would have been
     * enough for the last pause that was longer than SPIN_NS. Else it would keep torch's threads from its core. */
    SPIN_NS = 100000,
    LONG_SPIN_NS = 400000,
    SPINS_PER_CHECK = 16, /* pauses between two looks at the clock, which cost 20 ns each */
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

typedef struct job {
    kvc_item_fn *item;
    void *context;
    int64_t count;
    int wanted;       /* helpers that may still join */
    int joined;       /* helpers that have joined: the last one's thread number */
    int cpu;          /* of the caller */
    int asleep;       /* the caller waits for `left` */
    float_mode mode;  /* of the caller */
    atomic_int inside; /* helpers that have not left */
    _Atomic int64_t next;
    struct job *after; /* the job posted after this one */
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows */
static pthread_cond_t posted = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static job *first_job, **last_link = &first_job;
static int num_workers, num_sleeping, num_busy, num_callers; /* num_busy: inside of jobs */
static atomic_uint num_posted; /* jobs, ever: what a spinning worker watches */
static atomic_int num_spinning; /* workers, about to join what is posted */

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

/* Whether `changed(argument)` became true within `ns`. */
static int spin_until(int (*changed)(const void *), const void *argument, int64_t ns) {
    for (int64_t end = now_ns() + ns; now_ns() < end;) {
        for (int i = 0; i < SPINS_PER_CHECK; i++) {
            if (changed(argument)) return 1;
            pause_briefly();
        }
    }
    return changed(argument);
}

static int is_posted(const void *seen) { return atomic_load(&num_posted) != *(const unsigned *)seen; }
static int is_left(const void *j) { return atomic_load(&((job *)j)->inside) == 0; }

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

static void run(job *j, int64_t index, int thread) {
    for (; index < j->count; index = atomic_fetch_add(&j->next, 1)) j->item(j->context, index, thread);
}

static job *job_that_wants(void) {
    job *j = first_job;
    while (j && !j->wanted) j = j->after;
    return j;
}

/* A job to help with; the lock is held before and after. Sleeping, if nothing is posted for `spin_ns`, which this sets. */
static job *next_job(int64_t *spin_ns) {
    const int64_t start = now_ns();
    for (;;) {
        job *j = job_that_wants();
        if (j) {
            const int64_t pause = now_ns() - start;
            if (pause > SPIN_NS) *spin_ns = pause < LONG_SPIN_NS ? LONG_SPIN_NS : SPIN_NS;
            return j;
        }
        const unsigned seen = atomic_load(&num_posted);
        pthread_mutex_unlock(&lock);
        atomic_fetch_add(&num_spinning, 1);
        const int soon = spin_until(is_posted, &seen, *spin_ns);
        atomic_fetch_sub(&num_spinning, 1);
        pthread_mutex_lock(&lock);
        if (soon || (j = job_that_wants())) continue;
        num_sleeping++;
        pthread_cond_wait(&posted, &lock);
        num_sleeping--;
        j = job_that_wants();
        const int cpu = j ? j->cpu : -1;
        pthread_mutex_unlock(&lock);
        leave_cpu(cpu);
        pthread_mutex_lock(&lock);
    }
}

static void *work(void *unused) {
    int64_t spin_ns = SPIN_NS;
    pthread_mutex_lock(&lock);
    for (;;) {
        job *j = next_job(&spin_ns);
        const int thread = ++j->joined;
        j->wanted--, num_busy++;
        atomic_fetch_add(&j->inside, 1);
        pthread_mutex_unlock(&lock);
        set_mode(j->mode);
        run(j, atomic_fetch_add(&j->next, 1), thread);
        pthread_mutex_lock(&lock);
        num_busy--;
        if (j->asleep && atomic_load(&j->inside) == 1) pthread_cond_broadcast(&left);
        atomic_fetch_sub(&j->inside, 1); /* the last time that this thread touches the job */
    }
    return unused;
}

/* The child of a fork has one thread: the pool begins anew. The lock is held across the fork, so that nothing of it is
 * half done; conditions may have waiters, which the child does not have. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_in_child(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    posted = left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    first_job = NULL, last_link = &first_job;
    num_workers = num_sleeping = num_busy = num_callers = 0;
    atomic_store(&num_spinning, 0);
}
/* Before the first job: it must not wait with `lock` held, since a fork waits for `lock`. */
__attribute__((constructor)) static void handle_forks(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* Starts threads until `wanted` are free, or as many as there are CPUs, as far as the system allows; the lock is held.
 * They take no signals, which are for threads of Python. */
static void start_workers(int wanted) {
    pthread_attr_t detached;
    sigset_t all, before;
    if (num_workers >= num_busy + wanted) return;
    const int cpus = num_busy ? kvc_num_cpus() : 0;
    if (num_busy) wanted = num_busy + wanted < cpus ? num_busy + wanted : wanted < cpus ? cpus : wanted;
    if (num_workers >= wanted || pthread_attr_init(&detached)) return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&detached, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; num_workers < wanted && !pthread_create(&thread, &detached, work, NULL);) num_workers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

/* Callers share the threads: one that comes while others run gets the helpers that these leave of its number. */
static void post(job *j, int num_threads) {
    pthread_mutex_lock(&lock);
    const int rest = num_threads - 1 - num_callers++ - num_busy;
    if (j->wanted > rest) j->wanted = rest > 0 ? rest : 0;
    start_workers(j->wanted);
    *last_link = j, last_link = &j->after;
    atomic_fetch_add(&num_posted, 1);
    for (int i = j->wanted < num_sleeping ? j->wanted : num_sleeping; i > 0; i--) pthread_cond_signal(&posted);
    pthread_mutex_unlock(&lock);
}

/* No thread joins the job any more; then none is inside. */
static void withdraw(job *j) {
    pthread_mutex_lock(&lock);
    job **link = &first_job;
    while (*link != j) link = &(*link)->after;
    *link = j->after, num_callers--;
    if (last_link == &j->after) last_link = link;
    pthread_mutex_unlock(&lock);
    if (spin_until(is_left, j, SPIN_NS)) return;
    pthread_mutex_lock(&lock);
    j->asleep = 1;
    while (atomic_load(&j->inside)) pthread_cond_wait(&left, &lock);
    pthread_mutex_unlock(&lock);
}

void kvc_run_items(int64_t count, int num_threads, kvc_item_fn *item, void *context) {
    int64_t helpers = count < num_threads ? count - 1 : num_threads - 1;
    if (helpers > MAX_WORKERS) helpers = MAX_WORKERS;
    job j = {.item = item, .context = context, .count = count, .wanted = (int)helpers, .cpu = -1, .next = 1};
    if (helpers > 0) {
        j.cpu = this_cpu(), j.mode = get_mode();
        post(&j, num_threads);
    }
    run(&j, 0, 0);
    if (helpers > 0) withdraw(&j);
}

int kvc_helper_spins(void) { return atomic_load(&num_spinning) > 0; }

int kvc_num_cpus(void) {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}
