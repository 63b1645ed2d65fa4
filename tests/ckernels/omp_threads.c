/* omp_threads.c - the part of gcc's OpenMP runtime that kvc_parallel.c uses, over pthreads.
 *
 * libgomp waits with futexes, which ThreadSanitizer does not see, so it reports every join as a race. This file uses
 * mutexes and condition variables, which it knows. gcc compiles `omp parallel`, `for schedule(dynamic)` and `single` to
 * these names; any other pragma in kvc_parallel.c is an undefined symbol here.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct team {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    unsigned size, arrived;
    long turn;       /* barriers passed */
    long constructs; /* loops and singles begun by any thread: all threads begin them in the same order */
    long next, stop;
} team;

typedef struct member {
    team *of;
    unsigned number;
    long constructs; /* begun by this thread */
    void (*work)(void *);
    void *data;
} member;

static _Thread_local member *self;

void GOMP_barrier(void);
void GOMP_barrier(void) {
    team *t = self->of;
    pthread_mutex_lock(&t->lock);
    const long turn = t->turn;
    if (++t->arrived == t->size) {
        t->arrived = 0, t->turn++;
        pthread_cond_broadcast(&t->moved);
    }
    while (t->turn == turn) pthread_cond_wait(&t->moved, &t->lock);
    pthread_mutex_unlock(&t->lock);
}

/* Begins the next construct; returns whether this thread is the first to do so. The lock is held. */
static bool begins(team *t) {
    if (++self->constructs <= t->constructs) return false;
    t->constructs = self->constructs;
    return true;
}

bool GOMP_loop_nonmonotonic_dynamic_next(long *first, long *stop);
bool GOMP_loop_nonmonotonic_dynamic_next(long *first, long *stop) {
    team *t = self->of;
    pthread_mutex_lock(&t->lock);
    const bool more = t->next < t->stop;
    if (more) *first = t->next++, *stop = *first + 1;
    pthread_mutex_unlock(&t->lock);
    return more;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *first,
                                          long *stop);
bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *first,
                                          long *stop) {
    team *t = self->of;
    if (step != 1 || chunk != 1) abort();
    pthread_mutex_lock(&t->lock);
    if (begins(t)) t->next = start, t->stop = end;
    pthread_mutex_unlock(&t->lock);
    return GOMP_loop_nonmonotonic_dynamic_next(first, stop);
}

void GOMP_loop_end(void);
void GOMP_loop_end(void) { GOMP_barrier(); }
void GOMP_loop_end_nowait(void); /* the barrier of the last loop, after which the team ends */
void GOMP_loop_end_nowait(void) {}

bool GOMP_single_start(void);
bool GOMP_single_start(void) {
    team *t = self->of;
    pthread_mutex_lock(&t->lock);
    const bool mine = begins(t);
    pthread_mutex_unlock(&t->lock);
    return mine;
}

static void *work(void *to) {
    self = to;
    self->work(self->data);
    return NULL;
}

void GOMP_parallel(void (*function)(void *), void *data, unsigned size, unsigned flags);
void GOMP_parallel(void (*function)(void *), void *data, unsigned size, unsigned flags) {
    team t = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, size, 0, 0, 0, 0, 0};
    member *members = calloc(size, sizeof *members), *outer = self;
    pthread_t *threads = calloc(size, sizeof *threads);
    (void)flags;
    for (unsigned i = 0; i < size; i++) {
        members[i] = (member){&t, i, 0, function, data};
        if (i && pthread_create(&threads[i], NULL, work, &members[i])) abort();
    }
    work(&members[0]);
    for (unsigned i = 1; i < size; i++) pthread_join(threads[i], NULL);
    self = outer;
    free(members), free(threads);
}

int omp_get_thread_num(void);
int omp_get_thread_num(void) { return self ? (int)self->number : 0; }
int omp_get_num_procs(void);
int omp_get_num_procs(void) { return 4; }
