/* forkjoin.c - two pools of threads measured in turn, in one process or in two beside each other: what `run forkjoin` runs.
 *
 *     forkjoin THREADS ROUNDS PROCESSES
 *
 * A job has 4 items for each thread, of equal work. Rounds of jobs of either pool follow one another, so that both have
 * the same neighbours on a busy machine. Between two jobs the caller computes for the gap.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef void item_fn(void *context, int64_t index, int thread);
void before_run_items(int64_t count, int num_threads, item_fn *item, void *context);
void kvc_run_items(int64_t count, int num_threads, item_fn *item, void *context);
typedef void run_fn(int64_t, int, item_fn *, void *);

enum { POOLS = 2, JOBS = 40, ITEMS = 4, MOST_PROCESSES = 8, WARM = 2 };

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static double steps_per_ns;

static void compute(int64_t ns) {
    double x = 1;
    for (int64_t i = (int64_t)((double)ns * steps_per_ns); i > 0; i--) {
        x = x * 0.5 + 1;
        __asm__ __volatile__("" : "+x"(x));
    }
}

static void calibrate(void) {
    int64_t best = INT64_MAX;
    steps_per_ns = 1;
    for (int i = 0; i < 50; i++) {
        const int64_t start = now_ns();
        compute(100000);
        const int64_t took = now_ns() - start;
        if (took < best) best = took;
    }
    steps_per_ns = 100000.0 / (double)best;
}

static void item(void *context, int64_t index, int thread) {
    (void)index, (void)thread;
    compute(*(const int64_t *)context);
}

static int ascending(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static atomic_int *arrived; /* of all processes */

static void meet(int processes, int *meetings) {
    if (processes == 1) return;
    atomic_fetch_add(arrived, 1);
    for (const int all = processes * ++*meetings; atomic_load(arrived) < all;) usleep(50);
}

static void measure(int threads, int rounds, int processes, int first, int64_t work, int64_t gap) {
    static const char *const names[POOLS] = {"before", "now"};
    static run_fn *const pools[POOLS] = {before_run_items, kvc_run_items};
    int64_t *times[POOLS], item_ns = work / ITEMS, cpu[POOLS] = {0, 0};
    int meetings = 0;
    for (int p = 0; p < POOLS; p++) times[p] = malloc(sizeof(int64_t) * (size_t)(rounds * JOBS));
    for (int round = -WARM; round < rounds; round++) {
        for (int p = 0; p < POOLS; p++) {
            meet(processes, &meetings);
            usleep(1000); /* the other pool sleeps */
            pools[p](threads * ITEMS, threads, item, &item_ns);
            const int64_t cpu_start = cpu_ns();
            for (int i = 0; i < JOBS; i++) {
                if (gap > 500000) usleep((unsigned)(gap / 1000));
                else compute(gap);
                const int64_t start = now_ns();
                pools[p](threads * ITEMS, threads, item, &item_ns);
                if (round >= 0) times[p][round * JOBS + i] = now_ns() - start;
            }
            if (round >= 0) cpu[p] += cpu_ns() - cpu_start;
        }
    }
    const int n = rounds * JOBS;
    for (int p = 0; p < POOLS && first; p++) {
        qsort(times[p], (size_t)n, sizeof(int64_t), ascending);
        double mean = 0;
        for (int i = 0; i < n; i++) mean += (double)times[p][i] / n;
        printf("%8.0f %8.0f  %-6s %8.2f %8.2f %8.2f %8.2f %8.2f %10.2f\n", (double)work / 1e3, (double)gap / 1e3, names[p],
               (double)times[p][n / 10] / 1e3, (double)times[p][n / 2] / 1e3, (double)times[p][n * 9 / 10] / 1e3,
               (double)times[p][n * 99 / 100] / 1e3, mean / 1e3, (double)cpu[p] / n / 1e3);
    }
    fflush(stdout);
    for (int p = 0; p < POOLS; p++) free(times[p]);
    if (processes > 1) meet(processes, &meetings);
}

int main(int argc, char **argv) {
    static const int64_t works[] = {0, 20000, 100000}, gaps[] = {0, 20000, 300000, 2000000};
    const int threads = argc > 1 ? atoi(argv[1]) : 2, rounds = argc > 2 ? atoi(argv[2]) : 20;
    const int processes = argc > 3 ? atoi(argv[3]) : 1;
    if (threads < 1 || rounds < 1 || processes < 1 || processes > MOST_PROCESSES)
        return fprintf(stderr, "expected THREADS ROUNDS PROCESSES of at least 1, at most 8 processes\n"), 2;
    calibrate();
    arrived = mmap(NULL, sizeof(atomic_int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    printf("%d threads, %d process(es), jobs in us; `work` of each thread, `gap` between jobs\n", threads, processes);
    printf("%8s %8s  %-6s %8s %8s %8s %8s %8s %10s\n", "work", "gap", "pool", "p10", "median", "p90", "p99", "mean", "CPU a job");
    fflush(stdout);
    for (size_t g = 0; g < sizeof gaps / sizeof *gaps; g++) {
        for (size_t w = 0; w < sizeof works / sizeof *works; w++) {
            atomic_store(arrived, 0);
            for (int i = 1; i < processes; i++) {
                if (fork() == 0) measure(threads, rounds, processes, 0, works[w], gaps[g]), _exit(0);
            }
            measure(threads, rounds, processes, 1, works[w], gaps[g]);
            while (wait(NULL) > 0) {}
        }
    }
    return 0;
}
