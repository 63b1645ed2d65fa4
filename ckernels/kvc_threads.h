/* kvc_threads.h - a pool of threads that runs the items of a call. Its state is the only one that the kernels have. */
#ifndef KVC_THREADS_H
#define KVC_THREADS_H

#include <stdint.h>

/* One item of a call. `thread` is below num_threads, and no two items run at once with the same. */
typedef void kvc_item_fn(void *context, int64_t index, int thread);

/* Runs item(context, i, thread) for each i in [0, count), and returns when all have ended. The calling thread is thread 0
 * and runs item 0; at most num_threads - 1 threads of the pool help it with the others. Where the system refuses threads,
 * or all are busy with other calls, it runs more of the items itself, so a call never waits for a free thread. Any number
 * of threads may call at once; they share num_threads, as far as they are not more. A child of fork() has a new pool. Items must not call this function. */
void kvc_run_items(int64_t count, int num_threads, kvc_item_fn *item, void *context);

/* How many of `num_threads` threads are worth having for a call that takes one thread about `ns`: fewer where helpers
 * would have to be woken. The time may be wrong by a factor of some three: of less work than one thread's share, two
 * threads make nothing faster, nor slower. */
int kvc_threads_worth(int64_t ns, int num_threads);

/* Whether threads that wait spin for 20 us at most before they sleep: where a quota counts the time of CPUs, it pays for
 * spinning too. */
void kvc_spin_little(int little);

#endif
