/* kvc_spill_units.h - the records of units that spill (kvc_spill.c): where each lies, the memory that it takes, the order in which they
 * leave, and the queues of requests. All with the lock of the spill.
 */
#ifndef KVC_SPILL_UNITS_H
#define KVC_SPILL_UNITS_H

#include "kvc_spill.h"
#include "kvc_system.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

enum {
    MOST_THREADS = 64,
    REQUEST_BYTES = 128 << 10, /* of neighbours that are read or written together, at most */
    MOST_TOGETHER = 32,
    LEAVING = 64,              /* units that are written at once to make room */
    ALIGNMENT = 4096,          /* of buffers, as direct reads need */
    STACK_BYTES = 128 << 10,
    SPARE = 1024,              /* slots of the file that may have room beyond twice what is needed */
};

/* TAKEN: its memory counts. IS_LEAVING: it leaves once it is written. IS_LISTED: it is in the order of leaving.
 * IS_SPOILED: nothing has its bytes, until they are replaced. */
enum { TAKEN = 1, PRESENT = 2, BEING_READ = 4, BEING_WRITTEN = 8, SAVED = 16, IS_LEAVING = 32, IS_LISTED = 64, IS_SPOILED = 128 };

typedef struct unit_record {
    int32_t newer, older; /* in the order of leaving; -1: none */
    int32_t next;         /* in a queue of requests; of one that could not be read, the code of its request */
    uint32_t checksum;    /* of what the file has */
    uint32_t holds;
    unsigned char state;
    unsigned char in_file; /* its slot of the file has room, whatever lies there */
} unit_record;

typedef struct queue {
    int32_t first, last; /* -1: none */
} queue;

struct kvc_spill {
    pthread_mutex_t lock;
    pthread_cond_t wanted, done;
    kvc_process process;
    int fd, block_size, closing;
    int threads_wanted, unheard; /* not started yet; requests of which no thread was told */
    atomic_int num_threads;      /* that serve */
    unsigned char *arena;
    int32_t num_layers, num_blocks;
    size_t page, limit, *sizes, *starts, *slots, *offsets; /* of each layer: of a unit in the arena and in the file */
    uint16_t *page_users;                                   /* units that are TAKEN on each page of the system */
    unit_record *units;
    int64_t num_units, num_pages, being_written, write_faults;
    atomic_llong num_in_file;
    int keeps_slots; /* the file system takes no room back */
    int32_t newest, oldest;
    queue reads, writes;
    const int32_t *references;
    atomic_int write_error; /* of the last request that wrote; 0: none */
    kvc_fault fault;
    kvc_spill_stats stats;
    size_t buffer_bytes;
    pthread_t threads[MOST_THREADS];
};

/* ---- Places and bytes. */

static inline int32_t layer_of(const kvc_spill *s, int64_t unit) { return (int32_t)(unit / s->num_blocks); }
static inline int32_t block_of(const kvc_spill *s, int64_t unit) { return (int32_t)(unit % s->num_blocks); }
static inline size_t size_of(const kvc_spill *s, int64_t unit) { return s->sizes[layer_of(s, unit)]; }
static inline unsigned char *bytes_of(const kvc_spill *s, int64_t unit) {
    const int32_t layer = layer_of(s, unit);
    return s->arena + s->starts[layer] + (size_t)block_of(s, unit) * s->sizes[layer];
}
static inline int64_t offset_of(const kvc_spill *s, int64_t unit) {
    const int32_t layer = layer_of(s, unit);
    return (int64_t)(s->offsets[layer] + (size_t)block_of(s, unit) * s->slots[layer]);
}

/* The pages of the system that a unit lies on. */
static inline int64_t first_page(const kvc_spill *s, int64_t unit) { return (int64_t)((size_t)(bytes_of(s, unit) - s->arena) / s->page); }
static inline int64_t last_page(const kvc_spill *s, int64_t unit) {
    return (int64_t)(((size_t)(bytes_of(s, unit) - s->arena) + size_of(s, unit) - 1) / s->page);
}

static inline size_t bytes_to_take(const kvc_spill *s, int64_t unit) {
    size_t count = 0;
    for (int64_t p = first_page(s, unit); p <= last_page(s, unit); p++) count += !s->page_users[p];
    return count * s->page;
}

static inline void take_memory(kvc_spill *s, int64_t unit) {
    s->stats.resident += (int64_t)bytes_to_take(s, unit);
    for (int64_t p = first_page(s, unit); p <= last_page(s, unit); p++) s->page_users[p]++;
    s->units[unit].state |= TAKEN;
}

static inline void give_memory(kvc_spill *s, int64_t unit) {
    int64_t first = -1, stop = -1;
    for (int64_t p = first_page(s, unit); p <= last_page(s, unit); p++) {
        if (--s->page_users[p]) continue;
        if (first < 0) first = p;
        stop = p + 1;
    }
    s->units[unit].state &= (unsigned char)~TAKEN;
    if (first < 0) return;
    s->stats.resident -= (stop - first) * (int64_t)s->page; /* those in between are its own */
    kvc_give_back(s->arena + (size_t)first * s->page, (size_t)(stop - first) * s->page);
}

/* ---- The order of leaving, and the queues. */

static inline void list_unit(kvc_spill *s, int32_t unit, int leaves_next) {
    unit_record *u = &s->units[unit];
    u->newer = leaves_next ? s->oldest : -1, u->older = leaves_next ? -1 : s->newest;
    if (u->newer >= 0) s->units[u->newer].older = unit;
    if (u->older >= 0) s->units[u->older].newer = unit;
    if (leaves_next || s->oldest < 0) s->oldest = unit;
    if (!leaves_next || s->newest < 0) s->newest = unit;
    u->state |= IS_LISTED;
}

static inline void unlist_unit(kvc_spill *s, int32_t unit) {
    unit_record *u = &s->units[unit];
    if (!(u->state & IS_LISTED)) return;
    if (u->newer >= 0) s->units[u->newer].older = u->older;
    if (u->older >= 0) s->units[u->older].newer = u->newer;
    if (s->newest == unit) s->newest = u->older;
    if (s->oldest == unit) s->oldest = u->newer;
    u->newer = u->older = -1;
    u->state &= (unsigned char)~IS_LISTED;
}

/* Lists a unit if it is in memory and may leave. */
static inline void list_if_free(kvc_spill *s, int32_t unit, int leaves_next) {
    unit_record *u = &s->units[unit];
    if ((u->state & PRESENT) && !u->holds && !(u->state & (BEING_WRITTEN | IS_LISTED))) list_unit(s, unit, leaves_next);
}

static inline void push(kvc_spill *s, queue *q, int32_t unit) {
    s->units[unit].next = -1;
    if (q->last >= 0)
        s->units[q->last].next = unit;
    else
        q->first = unit;
    q->last = unit;
    s->unheard++;
}

static inline int32_t pop(kvc_spill *s, queue *q) {
    const int32_t unit = q->first;
    q->first = s->units[unit].next;
    if (q->first < 0) q->last = -1;
    return unit;
}

static inline int is_unused(const kvc_spill *s, int32_t unit) { return s->references && !s->references[block_of(s, unit)]; }

static inline void note_fault(kvc_spill *s, kvc_fault_kind kind, int64_t unit, int code) {
    s->stats.faults++;
    if (!s->fault.kind) s->fault = (kvc_fault){kind, layer_of(s, unit), block_of(s, unit), code};
}

#endif
