/* kvc_shared.h - numbers that one thread at a time changes, with a lock, while others look at them without it, to report them. A read
 * sees a number that there was, and says nothing of other memory.
 */
#ifndef KVC_SHARED_H
#define KVC_SHARED_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef _Atomic int32_t kvc_shared_int32;
typedef _Atomic int64_t kvc_shared_int64;
typedef _Atomic size_t kvc_shared_size;

#endif
