/* kvc_spill.h - blocks that lie in memory or in a file: a call holds those that it needs, and they stay in memory until then.
 *
 * A unit is one block of one layer, with all KV heads. It keeps its address in the arena, so that kernels know nothing of files:
 *
 *   in memory    its bytes are at its place                          saved: the file has the same bytes
 *   elsewhere    the system has taken the memory back                saved: in the file; not saved: zeros
 *
 * Where memory lacks room for what is held, the units that were held longest ago leave it; those that are not saved are written
 * first. A unit is written once, unless it changes again. Threads of their own read and write, many units at once. Each unit has a
 * checksum in memory: what the file gives back is what it was given, or a fault.
 */
#ifndef KVC_SPILL_H
#define KVC_SPILL_H

#include <stddef.h>

#include "kvc.h"

typedef struct kvc_spill kvc_spill;

/* Blocks of a layer, which may name one twice in a row: of runs[i], or of runs[list[i] / divisor]. */
typedef struct kvc_units {
    const kvc_run *runs;
    const int32_t *list; /* NULL, or (count) */
    int64_t count;
    int32_t divisor, layer;
} kvc_units;

/* What is done with units that are held. Replaced units need not be read. */
typedef enum kvc_use { KVC_TO_READ, KVC_TO_CHANGE, KVC_TO_REPLACE } kvc_use;

/* Why a unit is not there. */
typedef enum kvc_fault_kind { KVC_NO_FAULT, KVC_READ_FAULT, KVC_SHORT_FAULT, KVC_CHECKSUM_FAULT, KVC_FULL_FAULT, KVC_FORK_FAULT } kvc_fault_kind;
typedef struct kvc_fault {
    int32_t kind, layer, block, code; /* code: of the system, or 0 */
} kvc_fault;

/* Sums since the beginning, and bytes of now. Bytes of the file are whole slots of units. */
typedef struct kvc_spill_stats {
    int64_t resident;               /* bytes of memory that units take, in whole pages of the system */
    int64_t holds, held_units, waits; /* of units to read: calls, their units, and calls that waited for the file */
    int64_t read_units, read_bytes; /* from the file; those ahead of their use included */
    int64_t ahead_units;            /* of these, those that no call had asked for yet */
    int64_t written_units, written_bytes, dropped_units, faults;
    double read_seconds;            /* of requests, one beside another */
} kvc_spill_stats;

/* The arena lies at the beginning of a page: (layers, blocks, block_bytes of the layer), zero and untouched. `slot`: a unit takes a
 * multiple of it in the file. NULL: no memory. */
kvc_spill *kvc_spill_open(int fd, unsigned char *arena, int32_t num_layers, const size_t *block_bytes, int32_t num_blocks,
                          int block_size, size_t limit, size_t slot, int num_threads);
void kvc_spill_close(kvc_spill *);
size_t kvc_spill_bytes(const kvc_spill *); /* of its own records */
/* The references on each block, (blocks): units of blocks without one are dropped, not written. NULL: all have one. */
void kvc_spill_refer(kvc_spill *, const int32_t *references);

/* Holds units, and waits until they are in memory. A unit that cannot be read is a fault of the spill, and has undefined bytes
 * until it is released; what changes it then is lost. Returns how many. Any number of threads may hold at once; none holds twice, for it could wait
 * for itself. More than the limit is in memory only while held units alone are. */
int64_t kvc_hold(kvc_spill *, const kvc_units *, kvc_use);
void kvc_release(kvc_spill *, const kvc_units *, kvc_use);
/* Release units whose new bytes could not be read: each call that holds them from now on gets a fault. */
void kvc_spoil(kvc_spill *, const kvc_units *);
/* Begins to read units that are not in memory, as far as there is room without writing. */
void kvc_hold_ahead(kvc_spill *, const kvc_units *);
/* Makes zeros of a unit that is not in memory; 0: it is in memory, and has not changed. */
int kvc_blank(kvc_spill *, int32_t layer, int32_t block);

/* The first fault since the last call, which clears it. */
kvc_fault kvc_take_fault(kvc_spill *);
/* 0, or the system's error, if nothing can be written (it tries with the unit that leaves next), and half of what may be in memory waits
 * for that. */
int kvc_spill_expect_room(kvc_spill *);
/* Gives slots of the file that nothing needs back to the file system, where it can, once they are most of those that have room: `used`
 * blocks have references. Where the disk is full, a request that writes does so too. */
void kvc_spill_trim(kvc_spill *, int64_t used);
kvc_spill_stats kvc_spill_count(kvc_spill *);
/* NULL, or what is wrong with the records; while nobody else uses them. */
const char *kvc_spill_check(kvc_spill *);
/* Whether a unit is in memory (1), and saved (2). */
int kvc_spill_state(kvc_spill *, int32_t layer, int32_t block);

#endif
