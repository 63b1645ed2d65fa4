/* kvc_threads.h - a pool of threads that runs the items of a call. Its state is the only one that the kernels have. */
#ifndef KVC_THREADS_H
#define KVC_THREADS_H

#include <stdint.h>

/* One item of a call. `thread` is below num_threads, and no two items run at once with the same. */
typedef void kvc_item_fn(void *context, int64_t index, int thread);

/* Runs item(context, i, thread) for each i in [0, count), and returns when all have ended. The calling thread is thread 0
 * and runs item 0; at most num_threads - 1 threads of the pool help it with the others. Where the system refuses threads,
 * or all are busy with other calls, it runs more of the items itself, so a call never waits for a free thread. Any number
 * of threads may call at once; they share num_threads, as far as they are not more. A child of fork() has a new pool.
 * Items must not call this function. */
void kvc_run_items(int64_t count, int num_threads, kvc_item_fn *item, void *context);

/* Kinds of work, by what takes its time. */
typedef enum kvc_work {
    KVC_READING,     /* bytes of weights, for few rows */
    KVC_MULTIPLYING, /* products of a weight and an activation, for several rows */
    KVC_ATTENDING,   /* channels of K and V, for each row that attends to them */
    KVC_WRITING,     /* numbers that become K and V of blocks */
    KVC_COMPUTING,   /* numbers of norms, gates and rotations */
    KVC_SCANNING,    /* numbers of states and convolutions */
    KVC_NUM_WORKS
} kvc_work;

/* How many of `num_threads` threads are worth having for `units` units of work: fewer where helpers would have to be woken.
 * What a unit takes is measured in calls of kvc_run_work. */
int kvc_threads_worth(kvc_work work, int64_t units, int num_threads);

/* As kvc_run_items, whose items are of equal size and `units` of work together: measures what one takes. */
void kvc_run_work(kvc_work work, int64_t units, int64_t count, int num_threads, kvc_item_fn *item, void *context);

/* Whether threads that wait spin for 20 us at most before they sleep: where a quota counts the time of CPUs, it pays for
 * spinning too. */
void kvc_spin_little(int little);

#endif
