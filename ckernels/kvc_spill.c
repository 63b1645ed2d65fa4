/* kvc_spill.c - the residency of units (kvc_spill.h).
 *
 *   elsewhere -> being read -> in memory: held, or in the order of leaving -> elsewhere
 *                                           \-> being written -> saved
 *
 * The order of leaving has the units in memory that nobody holds and that are not being written, those released last at its
 * newest end. One lock guards all records; bytes are read, written and summed without it, for a unit that is being read belongs
 * to the thread that reads it, and one that is being written does not change.
 *
 * Units need not be whole pages of the system: a page is given back with the last unit on it. A unit that begins as zeros is
 * cleared, since its page may have stayed with what was there before.
 *
 * References of blocks are those of the calls that hold and release: they may be zero for a moment in between, while a call counts. A
 * thread of the spill looks at none.
 *
 * Threads that read go through a buffer of their own, so that requests may bypass the page cache (O_DIRECT), and neighbours in the
 * file are read and written together.
 */
#ifdef __linux__
#define _GNU_SOURCE
#endif
#include "kvc_system.h"

#include "kvc_checksum.h"
#include "kvc_spill_units.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Requests. */

/* Transfers all bytes; 0, or the system's error; -1: the file ends before. */
static int transfer(int fd, int is_read, unsigned char *buffer, size_t n, int64_t offset) {
    while (n) {
        const int64_t got = is_read ? kvc_read_at(fd, buffer, n, offset) : kvc_write_at(fd, buffer, n, offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return is_read ? -1 : ENOSPC;
        buffer += got, offset += got, n -= (size_t)got;
    }
    return 0;
}

typedef struct request {
    int is_read, count;
    int32_t unit; /* the first one of `count` neighbours */
    int codes[MOST_TOGETHER];              /* of each: 0, an error of the system, or -1: the file ends before */
    unsigned char is_good[MOST_TOGETHER]; /* of each that was read */
} request;

/* The next request: a unit and those queued behind it that follow in the file. Reads come first. */
static request next_request(kvc_spill *s) {
    request r = {.is_read = s->reads.first >= 0, .count = 1};
    queue *q = r.is_read ? &s->reads : &s->writes;
    r.unit = pop(s, q);
    const size_t most = s->buffer_bytes / s->slots[layer_of(s, r.unit)];
    while (q->first == r.unit + r.count && block_of(s, q->first) && (size_t)r.count < most && r.count < MOST_TOGETHER) pop(s, q), r.count++;
    return r;
}

/* Runs a request, without the lock. */
static void run_request(kvc_spill *s, request *r, unsigned char *buffer) {
    const size_t size = size_of(s, r->unit), slot = s->slots[layer_of(s, r->unit)], all = (size_t)r->count * slot;
    for (int i = 0; !r->is_read && i < r->count; i++) {
        memcpy(buffer + (size_t)i * slot, bytes_of(s, r->unit + i), size);
        memset(buffer + (size_t)i * slot + size, 0, slot - size);
        s->units[r->unit + i].checksum = kvc_checksum(buffer + (size_t)i * slot, size, (uint64_t)(r->unit + i));
    }
    const int code = transfer(s->fd, r->is_read, buffer, all, offset_of(s, r->unit));
#ifdef POSIX_FADV_DONTNEED
    posix_fadvise(s->fd, offset_of(s, r->unit), (off_t)all, POSIX_FADV_DONTNEED); /* nothing where requests are direct */
#endif
    for (int i = 0; i < r->count; i++) {
        unsigned char *own = buffer + (size_t)i * slot;
        const unit_record *u = &s->units[r->unit + i];
        r->codes[i] = code && r->count > 1 ? transfer(s->fd, r->is_read, own, slot, offset_of(s, r->unit + i)) : code;
        r->is_good[i] = !r->codes[i] && r->is_read && !(u->state & IS_SPOILED) &&
                        kvc_checksum(own, size, (uint64_t)(r->unit + i)) == u->checksum;
        if (r->is_good[i]) memcpy(bytes_of(s, r->unit + i), own, size);
    }
}

static void end_read(kvc_spill *s, int32_t unit, int code, int is_good) {
    unit_record *u = &s->units[unit];
    u->state &= (unsigned char)~BEING_READ;
    if (is_good) {
        u->state |= PRESENT;
        list_if_free(s, unit, 0);
        return;
    }
    u->next = code; /* of the fault: the thread that holds the unit reads it */
    if (!u->holds) give_memory(s, unit); /* it was read ahead; the next call that holds it reads it again */
}

static void end_write(kvc_spill *s, int32_t unit, int code) {
    unit_record *u = &s->units[unit];
    const int leaves = u->state & IS_LEAVING;
    u->state &= (unsigned char)~(BEING_WRITTEN | IS_LEAVING);
    s->being_written--;
    s->num_in_file += !u->in_file;
    u->in_file = 1; /* a part of it, where it failed */
    if (code) {
        s->write_faults++, s->write_error = code;
    } else {
        u->state |= SAVED, s->write_error = 0;
        s->stats.written_units++;
        s->stats.written_bytes += (int64_t)s->slots[layer_of(s, unit)];
    }
    list_if_free(s, unit, leaves && !code);
}

static void end_request(kvc_spill *s, const request *r, double seconds) {
    const int64_t bytes = r->count * (int64_t)s->slots[layer_of(s, r->unit)];
    for (int i = 0; i < r->count; i++) {
        if (r->is_read)
            end_read(s, r->unit + i, r->codes[i], r->is_good[i]);
        else
            end_write(s, r->unit + i, r->codes[i]);
    }
    if (r->is_read) s->stats.read_units += r->count, s->stats.read_bytes += bytes, s->stats.read_seconds += seconds;
    pthread_cond_broadcast(&s->done);
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whether the file has room for what nothing reads any more: of a unit that has changed since, or, in a call, of a block that nobody
 * has. */
static int is_spare(const kvc_spill *s, int64_t unit, int in_call) {
    const unit_record *u = &s->units[unit];
    if (!u->in_file || (u->state & (BEING_READ | BEING_WRITTEN))) return 0;
    return !(u->state & SAVED) || (in_call && is_unused(s, (int32_t)unit));
}

/* Gives all such room back, that of neighbours at once; whether there was any. */
static int punch_spare(kvc_spill *s, int in_call) {
    int64_t given = 0;
    for (int64_t unit = 0, stop; unit < s->num_units && !s->keeps_slots; unit = stop) {
        const int32_t layer = layer_of(s, unit);
        for (stop = unit; stop < s->num_units && layer_of(s, stop) == layer && is_spare(s, stop, in_call);) stop++;
        if (stop == unit) {
            stop++;
            continue;
        }
        s->keeps_slots = !kvc_punch(s->fd, offset_of(s, unit), (int64_t)((size_t)(stop - unit) * s->slots[layer]));
        for (int64_t i = unit; i < stop && !s->keeps_slots; i++, given++)
            s->units[i].in_file = 0, s->units[i].state &= (unsigned char)~(SAVED | IS_SPOILED);
    }
    s->num_in_file -= given;
    return given > 0;
}

static int is_lack_of_room(int code) { return code == ENOSPC || code == EDQUOT; }

static int lacks_room(const request *r) {
    int lacking = 0;
    for (int i = 0; i < r->count; i++) lacking += !r->is_read && is_lack_of_room(r->codes[i]);
    return lacking;
}

/* Runs the next request; with the lock, which it leaves meanwhile. What the disk has no room for is written once more where
 * slots of others can be given back. */
static void serve(kvc_spill *s, unsigned char *buffer, int in_call) {
    request r = next_request(s);
    const double begun = seconds_now();
    for (int again = 1; again >= 0; again--) {
        pthread_mutex_unlock(&s->lock);
        run_request(s, &r, buffer);
        pthread_mutex_lock(&s->lock);
        if (!again || !lacks_room(&r) || !punch_spare(s, in_call)) break;
    }
    end_request(s, &r, seconds_now() - begun);
}

static void *work(void *context) {
    kvc_spill *s = context;
    void *buffer = kvc_allocate_aligned(ALIGNMENT, s->buffer_bytes);
    pthread_mutex_lock(&s->lock);
    while (buffer && !s->closing) {
        if (s->reads.first < 0 && s->writes.first < 0)
            pthread_cond_wait(&s->wanted, &s->lock);
        else
            serve(s, buffer, 0);
    }
    if (!buffer) s->num_threads--; /* other threads serve then, or those that wait */
    pthread_cond_broadcast(&s->done);
    pthread_mutex_unlock(&s->lock);
    kvc_free_aligned(buffer);
    return NULL;
}

/* Starts the threads at the first request: none serves signals. */
static void start_threads(kvc_spill *s) {
    pthread_attr_t small;
    kvc_signals before;
    if (s->threads_wanted <= 0 || pthread_attr_init(&small)) return;
    pthread_attr_setstacksize(&small, STACK_BYTES);
    kvc_block_signals(&before);
    int count = 0;
    while (count < s->threads_wanted && !pthread_create(&s->threads[count], &small, work, s)) count++;
    kvc_allow_signals(&before);
    pthread_attr_destroy(&small);
    s->num_threads += count;
    s->threads_wanted = -count;
}

/* Tells threads of what is queued: last, for they need the lock. */
static void tell_threads(kvc_spill *s) {
    if (s->unheard && s->threads_wanted > 0) start_threads(s);
    for (int i = 0; i < s->unheard && i < s->num_threads; i++) pthread_cond_signal(&s->wanted);
    s->unheard = 0;
}

/* Waits for the end of a request; serves one itself where there are no threads. 0: that is not possible either. */
static int wait_for_one(kvc_spill *s) {
    tell_threads(s);
    if (s->num_threads > 0) {
        pthread_cond_wait(&s->done, &s->lock);
        return 1;
    }
    if (s->reads.first < 0 && s->writes.first < 0) { /* another caller runs it */
        pthread_cond_wait(&s->done, &s->lock);
        return 1;
    }
    void *buffer = kvc_allocate_aligned(ALIGNMENT, s->buffer_bytes);
    if (!buffer) return 0;
    serve(s, buffer, 1);
    kvc_free_aligned(buffer);
    return 1;
}

/* ---- Room. */

static void begin_write(kvc_spill *s, int32_t unit, int leaves) {
    unit_record *u = &s->units[unit];
    unlist_unit(s, unit);
    u->state |= BEING_WRITTEN;
    if (leaves) u->state |= IS_LEAVING;
    s->being_written++;
    push(s, &s->writes, unit);
}

/* Drops a listed unit that is saved, or of a block that nobody has; 0: it must be written first. */
static int drop_unit(kvc_spill *s, int32_t unit) {
    unit_record *u = &s->units[unit];
    if (is_unused(s, unit))
        u->state &= (unsigned char)~(SAVED | IS_SPOILED);
    else if (!(u->state & SAVED))
        return 0;
    unlist_unit(s, unit);
    u->state &= (unsigned char)~PRESENT;
    give_memory(s, unit);
    s->stats.dropped_units++;
    return 1;
}

static size_t bytes_with(const kvc_spill *s, int32_t unit) { return (size_t)s->stats.resident + (unit < 0 ? 0 : bytes_to_take(s, unit)); }

/* Lets units leave until there is room for one more; -1: until no more is there than may be. 1: there is, or all in memory is held;
 * 0: the rest cannot be written. What the unit takes changes with its neighbours, whose pages it may lie on. */
static int make_room(kvc_spill *s, int32_t unit_to_come) {
    int64_t faults = s->write_faults;
    int may_punch = 1;
    while (bytes_with(s, unit_to_come) > s->limit) {
        int written = 0, dropped = 0;
        for (int32_t unit = s->oldest, newer; unit >= 0 && written < LEAVING; unit = newer) {
            newer = s->units[unit].newer;
            if (drop_unit(s, unit)) {
                dropped++;
                if (bytes_with(s, unit_to_come) <= s->limit) break;
            } else if (s->write_faults == faults) {
                begin_write(s, unit, 1);
                written++;
            }
        }
        if (dropped) continue;
        if (!s->being_written) {
            if (s->write_faults == faults) return 1;
            if (!may_punch || !is_lack_of_room(s->write_error) || !punch_spare(s, 1)) return 0;
            may_punch = 0, faults = s->write_faults; /* the file has room now */
            continue;
        }
        if (!wait_for_one(s)) return 1; /* no memory for a buffer: more is in memory than should be */
    }
    return 1;
}

/* ---- Holding. */

/* The units of a list, one after another, each once; `run` is that of the unit. */
typedef struct unit_walk {
    const kvc_units *units;
    const kvc_run *run;
    int64_t next;
    int32_t last;
} unit_walk;

static unit_walk walk_of(const kvc_units *units) { return (unit_walk){.units = units, .last = -1}; }

static int32_t next_unit(const kvc_spill *s, unit_walk *walk) { /* -1: there are no more */
    const kvc_units *units = walk->units;
    while (walk->next < units->count) {
        const int64_t i = walk->next++;
        walk->run = units->runs + (units->list ? units->list[i] / units->divisor : i);
        if (walk->run->block == walk->last) continue;
        walk->last = walk->run->block;
        return (int32_t)(units->layer * (int64_t)s->num_blocks + walk->last);
    }
    return -1;
}

/* Brings a unit that is held into memory, or begins to. 1: it is there. */
static int bring(kvc_spill *s, int32_t unit, kvc_use use) {
    unit_record *u = &s->units[unit];
    if (!(u->state & TAKEN)) {
        const int is_room = make_room(s, unit); /* others may have brought it meanwhile */
        if (!is_room && use == KVC_TO_READ && !(u->state & TAKEN)) {
            note_fault(s, KVC_FULL_FAULT, unit, s->write_error);
            return 1;
        }
    }
    if (u->state & TAKEN) return (u->state & PRESENT) && (use == KVC_TO_READ || !(u->state & BEING_WRITTEN));
    take_memory(s, unit);
    if ((u->state & SAVED) && use != KVC_TO_REPLACE) {
        u->state |= BEING_READ;
        push(s, &s->reads, unit);
        return 0;
    }
    if (use != KVC_TO_REPLACE) memset(bytes_of(s, unit), 0, size_of(s, unit));
    u->state |= PRESENT;
    return 1;
}

static int is_busy(const unit_record *u, kvc_use use) {
    return (u->state & BEING_READ) || (use != KVC_TO_READ && (u->state & BEING_WRITTEN));
}

static int is_elsewhere(kvc_spill *s, const kvc_units *units) { /* a child of fork() has neither threads nor a file of its own */
    if (kvc_this_process() == s->process) return 0;
    if (!s->fault.kind) s->fault = (kvc_fault){KVC_FORK_FAULT, units->layer, 0, 0};
    return 1;
}

int64_t kvc_hold(kvc_spill *s, const kvc_units *units, kvc_use use) {
    int64_t waits = 0, missing = 0;
    if (!units->count) return 0;
    if (is_elsewhere(s, units)) return units->count;
    pthread_mutex_lock(&s->lock);
    unit_walk walk = walk_of(units);
    for (int32_t unit; (unit = next_unit(s, &walk)) >= 0;) { /* all before any is brought, so that none leaves for another */
        unlist_unit(s, unit);
        s->units[unit].holds++;
        s->stats.held_units += use == KVC_TO_READ;
    }
    walk = walk_of(units);
    for (int32_t unit; (unit = next_unit(s, &walk)) >= 0;) waits += !bring(s, unit, use);
    walk = walk_of(units);
    for (int32_t unit; (unit = next_unit(s, &walk)) >= 0;) {
        while (is_busy(&s->units[unit], use) && wait_for_one(s)) continue;
        unit_record *u = &s->units[unit];
        if (use == KVC_TO_REPLACE) u->state |= PRESENT; /* also where it was read ahead, in vain */
        if (!(u->state & PRESENT)) {
            const kvc_fault_kind kind = !u->next ? KVC_CHECKSUM_FAULT : u->next < 0 ? KVC_SHORT_FAULT : KVC_READ_FAULT;
            missing++;
            if (u->state & TAKEN) note_fault(s, kind, unit, u->next);
        }
        if (use != KVC_TO_READ && (u->state & PRESENT)) u->state &= (unsigned char)~(SAVED | IS_SPOILED);
    }
    if (use == KVC_TO_READ) s->stats.holds++, s->stats.waits += waits > 0;
    tell_threads(s);
    pthread_mutex_unlock(&s->lock);
    return missing;
}

void kvc_release(kvc_spill *s, const kvc_units *units, kvc_use use) {
    if (!units->count || is_elsewhere(s, units)) return;
    pthread_mutex_lock(&s->lock);
    unit_walk walk = walk_of(units);
    for (int32_t unit; (unit = next_unit(s, &walk)) >= 0;) {
        unit_record *u = &s->units[unit];
        if (--u->holds) continue;
        if (!(u->state & PRESENT)) { /* it could not be read; what was to change it is lost */
            if (use != KVC_TO_READ) u->state |= IS_SPOILED;
            if (u->state & TAKEN) give_memory(s, unit);
            continue;
        }
        list_if_free(s, unit, 0);
        /* Written behind, once memory is half full: a block whose last slot has come does not change any more. */
        if (use == KVC_TO_READ || walk.run->stop != s->block_size || (size_t)s->stats.resident * 2 < s->limit || s->write_error) continue;
        begin_write(s, unit, 0);
    }
    make_room(s, -1); /* what was held may have had no room */
    tell_threads(s);
    pthread_mutex_unlock(&s->lock);
}

void kvc_spoil(kvc_spill *s, const kvc_units *units) {
    if (!units->count || is_elsewhere(s, units)) return;
    pthread_mutex_lock(&s->lock);
    unit_walk walk = walk_of(units);
    for (int32_t unit; (unit = next_unit(s, &walk)) >= 0;) {
        unit_record *u = &s->units[unit];
        u->state = (unsigned char)((u->state & ~PRESENT) | SAVED | IS_SPOILED);
        if (!--u->holds && (u->state & TAKEN)) give_memory(s, unit);
    }
    pthread_mutex_unlock(&s->lock);
}

void kvc_hold_ahead(kvc_spill *s, const kvc_units *units) {
    if (!units->count || is_elsewhere(s, units)) return;
    pthread_mutex_lock(&s->lock);
    unit_walk walk = walk_of(units);
    for (int32_t unit; (unit = next_unit(s, &walk)) >= 0;) {
        unit_record *u = &s->units[unit];
        if ((u->state & TAKEN) || !(u->state & SAVED)) continue;
        while (bytes_with(s, unit) > s->limit && s->oldest >= 0 && drop_unit(s, s->oldest)) continue;
        if (bytes_with(s, unit) > s->limit) break;
        take_memory(s, unit);
        u->state |= BEING_READ;
        push(s, &s->reads, unit);
        s->stats.ahead_units++;
    }
    tell_threads(s);
    pthread_mutex_unlock(&s->lock);
}

int kvc_blank(kvc_spill *s, int32_t layer, int32_t block) {
    const kvc_units units = {.layer = layer};
    if (is_elsewhere(s, &units)) return 0;
    pthread_mutex_lock(&s->lock);
    unit_record *u = &s->units[(int64_t)layer * s->num_blocks + block];
    while (u->state & BEING_READ) {
        if (!wait_for_one(s)) break;
    }
    const int is_there = u->state & TAKEN;
    if (!is_there) u->state &= (unsigned char)~(SAVED | IS_SPOILED);
    pthread_mutex_unlock(&s->lock);
    return !is_there;
}

/* ---- The whole. */

kvc_spill *kvc_spill_open(int fd, unsigned char *arena, int32_t num_layers, const size_t *block_bytes, int32_t num_blocks,
                          int block_size, size_t limit, size_t slot, int num_threads) {
    kvc_spill *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->fd = fd, s->arena = arena, s->num_layers = num_layers, s->num_blocks = num_blocks, s->block_size = block_size;
    s->limit = limit, s->process = kvc_this_process(), s->page = kvc_page_size();
    s->threads_wanted = num_threads < MOST_THREADS ? num_threads : MOST_THREADS;
    s->newest = s->oldest = s->reads.first = s->reads.last = s->writes.first = s->writes.last = -1;
    s->num_units = (int64_t)num_layers * num_blocks;
    s->sizes = calloc(4 * (size_t)num_layers + 4, sizeof(size_t));
    if (s->sizes) {
        size_t start = 0, offset = 0;
        s->starts = s->sizes + num_layers + 1, s->slots = s->starts + num_layers + 1, s->offsets = s->slots + num_layers + 1;
        for (int32_t layer = 0; layer < num_layers; layer++) {
            s->sizes[layer] = block_bytes[layer], s->slots[layer] = (block_bytes[layer] + slot - 1) / slot * slot;
            s->starts[layer] = start, s->offsets[layer] = offset;
            start += s->sizes[layer] * (size_t)num_blocks, offset += s->slots[layer] * (size_t)num_blocks;
            if (s->buffer_bytes < s->slots[layer]) s->buffer_bytes = s->slots[layer];
        }
        if (s->buffer_bytes < REQUEST_BYTES) s->buffer_bytes = REQUEST_BYTES;
        s->num_pages = (int64_t)((start + s->page - 1) / s->page);
    }
    s->page_users = calloc((size_t)s->num_pages + 1, sizeof *s->page_users);
    s->units = calloc((size_t)s->num_units + 1, sizeof *s->units);
    if (!s->sizes || !s->page_users || !s->units) {
        free(s->sizes), free(s->page_users), free(s->units), free(s);
        return NULL;
    }
    for (int64_t i = 0; i < s->num_units; i++) s->units[i].newer = s->units[i].older = s->units[i].next = -1;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wanted, NULL);
    pthread_cond_init(&s->done, NULL);
    return s;
}

void kvc_spill_close(kvc_spill *s) {
    if (!s) return;
    if (kvc_this_process() == s->process) {
        pthread_mutex_lock(&s->lock);
        s->closing = 1;
        pthread_cond_broadcast(&s->wanted);
        pthread_mutex_unlock(&s->lock);
        for (int i = 0; i < -s->threads_wanted; i++) pthread_join(s->threads[i], NULL);
        pthread_mutex_destroy(&s->lock);
        pthread_cond_destroy(&s->wanted);
        pthread_cond_destroy(&s->done);
    }
    free(s->sizes), free(s->page_users), free(s->units), free(s);
}

size_t kvc_spill_bytes(const kvc_spill *s) {
    const int num_threads = s->num_threads, threads = num_threads > 0 ? num_threads : 0;
    return sizeof *s + (size_t)s->num_units * sizeof *s->units + (size_t)s->num_pages * sizeof *s->page_users +
           (size_t)threads * s->buffer_bytes;
}

void kvc_spill_refer(kvc_spill *s, const int32_t *references) { s->references = references; }

kvc_fault kvc_take_fault(kvc_spill *s) {
    const kvc_fault fault = s->fault;
    if (fault.kind) s->fault = (kvc_fault){0};
    return fault;
}

int kvc_spill_expect_room(kvc_spill *s) {
    if (!s->write_error || kvc_this_process() != s->process) return 0;
    pthread_mutex_lock(&s->lock);
    int32_t unit = -1;
    size_t stays = 0; /* bytes of units that must be written before they leave */
    for (int32_t each = s->newest; each >= 0; each = s->units[each].older) {
        if ((s->units[each].state & SAVED) || is_unused(s, each)) continue;
        unit = each, stays += size_of(s, each);
    }
    if (stays * 2 < s->limit) { /* what comes has room in memory */
        pthread_mutex_unlock(&s->lock);
        return 0;
    }
    if (unit >= 0 && is_lack_of_room(s->write_error)) punch_spare(s, 1);
    if (unit >= 0) begin_write(s, unit, 0);
    while (unit >= 0 && (s->units[unit].state & BEING_WRITTEN) && wait_for_one(s)) continue;
    if (unit < 0) s->write_error = 0; /* nothing needs to be written */
    const int error = s->write_error;
    pthread_mutex_unlock(&s->lock);
    return error;
}

void kvc_spill_trim(kvc_spill *s, int64_t used) {
    if (s->num_in_file <= 2 * used * s->num_layers + SPARE || kvc_this_process() != s->process) return;
    pthread_mutex_lock(&s->lock);
    punch_spare(s, 1);
    pthread_mutex_unlock(&s->lock);
}

kvc_spill_stats kvc_spill_count(kvc_spill *s) {
    if (kvc_this_process() != s->process) return s->stats;
    pthread_mutex_lock(&s->lock);
    const kvc_spill_stats stats = s->stats;
    pthread_mutex_unlock(&s->lock);
    return stats;
}

int kvc_spill_state(kvc_spill *s, int32_t layer, int32_t block) {
    pthread_mutex_lock(&s->lock);
    const int state = s->units[(int64_t)layer * s->num_blocks + block].state;
    pthread_mutex_unlock(&s->lock);
    return (state & PRESENT ? 1 : 0) + (state & SAVED ? 2 : 0);
}

/* What is wrong with the records of units, while requests may run. */
static const char *check_units(kvc_spill *s, uint16_t *users) {
    int64_t listed = 0, taken = 0, in_file = 0;
    for (int32_t unit = s->oldest, older = -1; unit >= 0; older = unit, unit = s->units[unit].newer, listed++) {
        if (listed > s->num_units || s->units[unit].older != older) return "the order of leaving is broken";
        if (!(s->units[unit].state & IS_LISTED)) return "a unit in the order of leaving does not know it";
        if (s->units[unit].newer < 0 && s->newest != unit) return "the order of leaving has another end";
    }
    for (int64_t i = 0; i < s->num_units; i++) {
        const unit_record *u = &s->units[i];
        const int state = u->state, is_there = state & PRESENT;
        if (u->holds) return "a unit is held between calls";
        listed -= (state & IS_LISTED) > 0, in_file += u->in_file;
        if ((state & SAVED) && !(state & IS_SPOILED) && !u->in_file) return "a unit that is saved has no slot";
        if (!(state & TAKEN) != !(state & (PRESENT | BEING_READ))) return "memory is taken for a unit that is not there, or not for one that is";
        if ((state & IS_LISTED) && (!is_there || (state & BEING_WRITTEN))) return "a unit that cannot leave is in the order of leaving";
        if (is_there && !(state & (IS_LISTED | BEING_WRITTEN))) return "a unit in memory is not in the order of leaving";
        if (is_there && (state & BEING_READ)) return "a unit in memory is being read";
        for (int64_t p = first_page(s, i); (state & TAKEN) && p <= last_page(s, i); p++) users[p]++;
    }
    if (listed) return "the order of leaving lacks a unit";
    if (in_file != s->num_in_file) return "the slots of the file are counted wrongly";
    for (int64_t p = 0; p < s->num_pages; p++) {
        if (users[p] != s->page_users[p]) return "the users of a page are counted wrongly";
        taken += users[p] > 0;
    }
    if (taken * (int64_t)s->page != s->stats.resident) return "the bytes in memory are counted wrongly";
    if ((size_t)s->stats.resident > s->limit && !s->write_error) return "more is in memory than the limit, and nothing is held";
    return NULL;
}

const char *kvc_spill_check(kvc_spill *s) {
    uint16_t *users = calloc((size_t)s->num_pages + 1, sizeof *users);
    if (!users) return "no memory to check";
    pthread_mutex_lock(&s->lock);
    const char *wrong = check_units(s, users);
    pthread_mutex_unlock(&s->lock);
    free(users);
    return wrong;
}
