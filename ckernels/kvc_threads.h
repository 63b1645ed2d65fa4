/* kvc_threads.h - a pool of threads that runs the items of a call. Its state is the only one that the kernels have. */
#ifndef KVC_THREADS_H
#define KVC_THREADS_H

#include <stdint.h>

/* One item of a call. `thread` is below num_threads, and no two items run at once with the same. */
typedef void kvc_item_fn(void *context, int64_t index, int thread);

/* Runs item(context, i, thread) for each i in [0, count), and returns when all have ended. The calling thread is thread 0
 * and runs item 0; at most num_threads - 1 threads of the pool help it with the others. Where the system refuses threads,
 * or all are busy with other calls, it runs more of the items itself, so a call never waits for a free thread. Any number
 * of threads may call at once. A child of fork() has a new pool. Items must not call this function. */
void kvc_run_items(int64_t count, int num_threads, kvc_item_fn *item, void *context);

/* Whether a thread of the pool spins, so that it would help at once; it may be asleep a moment later. */
int kvc_helper_spins(void);

/* CPUs that the scheduler may give to this process, at least 1. */
int kvc_num_cpus(void);

#endif
