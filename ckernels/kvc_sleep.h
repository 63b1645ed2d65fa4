/* kvc_sleep.h - words that threads sleep on: futexes of Linux; elsewhere a mutex and a condition of each sleeper. */
#ifndef KVC_SLEEP_H
#define KVC_SLEEP_H

#include <stdatomic.h>

#if defined(__linux__) && !defined(KVC_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef char kvc_bed; /* what a sleeper needs beside its word */

static inline void kvc_make_bed(kvc_bed *bed) { *bed = 0; }

/* Sleeps as long as the word has this value. */
static inline void kvc_sleep_while(atomic_uint *word, unsigned value, kvc_bed *bed) {
    (void)bed;
    while (atomic_load(word) == value) syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

/* Wakes the thread that sleeps on the word. The word was changed before. */
static inline void kvc_wake(atomic_uint *word, kvc_bed *bed) {
    (void)bed;
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

#else
#include <pthread.h>

typedef struct kvc_bed {
    pthread_mutex_t lock;
    pthread_cond_t changed;
} kvc_bed;

static inline void kvc_make_bed(kvc_bed *bed) {
    bed->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER, bed->changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

static inline void kvc_sleep_while(atomic_uint *word, unsigned value, kvc_bed *bed) {
    pthread_mutex_lock(&bed->lock);
    while (atomic_load(word) == value) pthread_cond_wait(&bed->changed, &bed->lock);
    pthread_mutex_unlock(&bed->lock);
}

static inline void kvc_wake(atomic_uint *word, kvc_bed *bed) {
    (void)word;
    pthread_mutex_lock(&bed->lock); /* so that the sleeper has not just looked at the old value */
    pthread_cond_broadcast(&bed->changed);
    pthread_mutex_unlock(&bed->lock);
}

#endif
#endif
