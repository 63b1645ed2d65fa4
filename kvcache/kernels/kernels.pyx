"""The only file that calls the C kernels: it selects the level, checks arguments from Python, and forwards calls."""

cdef extern from "Python.h":
    ctypedef struct PyInterpreterState:
        pass
    PyInterpreterState *PyInterpreterState_Get()
    PyInterpreterState *PyInterpreterState_Main()

# Cython's `with gil` takes the GIL of the main interpreter: in another interpreter it would wait for ever.
if PyInterpreterState_Get() != PyInterpreterState_Main():
    raise ImportError("kvcache: expected the main interpreter, got a subinterpreter")

import os
from collections import namedtuple
from contextlib import contextmanager

from kvcache.support.arguments import as_count, spelled
from kvcache.support.cpus import available_cpus, has_quota
from kvcache.support.shared_numbers cimport shared_int32

cdef extern from "kvc_functions.h" nogil:
    double kvc_exp(double x) noexcept
    double kvc_exp2(double x) noexcept
    double kvc_log(double x) noexcept
    double kvc_log1p(double x) noexcept
    double kvc_power(double x, double y) noexcept
    double kvc_sin(double x) noexcept
    double kvc_cos(double x) noexcept
    double kvc_tanh(double x) noexcept
    void kvc_product(int64_t n, int64_t k, int64_t m, const double *a, const double *b, double *out) noexcept
    void kvc_turns(int64_t n, int64_t pairs, const int64_t *positions, const double *frequencies, double scale,
                   float *cosines, float *sines) noexcept

cdef extern from "kvc_merge.h" nogil:
    void kvc_merge(int64_t n, int64_t heads, int64_t dim, const int64_t *starts, const int64_t *chosen, float *parts,
                   float *logs, float *mixed, float *masses) noexcept

cdef extern from "kvc.h" nogil:
    ctypedef struct kvc_kernels:
        const char *name
        void (*gather_rows)(const kvc_tensor *, int64_t, int64_t, int, int, float *) noexcept nogil
        void (*read_runs)(const kvc_layout *, const unsigned char *, const kvc_run *, int64_t, float *, float *,
                          size_t, size_t, const kvc_head_keys *) noexcept nogil
        int64_t (*check_representable)(const float *, int64_t, kvc_format) noexcept nogil
        void (*quantise_weights)(kvc_matrix_format, int64_t, int64_t, const float *, unsigned char *, uint16_t *,
                                 uint16_t *) noexcept nogil
        void (*softcap)(int64_t, const float *, float, float *) noexcept nogil
        uint64_t (*shares)(int64_t, const float *, float, float, uint64_t *) noexcept nogil
        void (*decays)(int64_t, int64_t, const float *, int64_t, const float *, const float *, float, float, float *,
                       float *) noexcept nogil
        void (*bounded_decays)(int64_t, int64_t, const float *, int64_t, const float *, const float *, float,
                               float *) noexcept nogil
        void (*digest)(int64_t, const unsigned char *, const uint32_t *, uint64_t *) noexcept nogil
        void (*summarise_page)(const kvc_layout *, const unsigned char *, int32_t, int, const void *) noexcept nogil

    enum: KVC_BITS
    int kvc_num_levels() noexcept
    const char *kvc_best_level() noexcept
    const kvc_kernels *kvc_level(int index) noexcept
    const kvc_kernels *kvc_find_level(const char *name) noexcept
    kvc_bf16_rows kvc_bf16_rows_of(const kvc_kernels *kernels) noexcept
    int kvc_layout_init(kvc_layout *layout, int block_size, int num_heads, int head_dim, int value_head_dim,
                        kvc_format key_format, kvc_format value_format, int rotate_keys, int rotate_values,
                        int latent) noexcept
    void kvc_copy_slots(const kvc_layout *layout, const unsigned char *src_arena, int32_t src_block, int src_slot,
                        unsigned char *dst_arena, int32_t dst_block, int dst_slot, int count) noexcept
    void kvc_clear_slots(const kvc_layout *layout, unsigned char *arena, int32_t block, int slot, int count) noexcept
    size_t kvc_attend_scratch_bytes(const kvc_layout *layout, const kvc_seq *seqs, const kvc_seq *residuals,
                                    int64_t num_seqs, int num_query_heads, int num_threads) noexcept
    void kvc_attend(const kvc_kernels *kernels, const kvc_attend_args *args, void *scratch,
                    int num_threads) noexcept
    void kvc_write_runs(const kvc_kernels *kernels, const kvc_layout *layout, unsigned char *arena,
                        const kvc_run *runs, int64_t num_runs, kvc_float_rows keys, kvc_float_rows values,
                        const kvc_head_keys *known, int num_threads) noexcept
    size_t kvc_matmul_scratch_bytes(const kvc_matmul_args *args, int num_threads) noexcept
    void kvc_matmul(const kvc_kernels *kernels, const kvc_matmul_args *args, int num_threads) noexcept
    void kvc_rms_norm(const kvc_kernels *kernels, int64_t n, int64_t heads, int64_t dim, const float *x,
                      int64_t x_stride, const float *weight, float eps, float *out, int num_threads) noexcept
    void kvc_thin(const kvc_kernels *kernels, int64_t n, int64_t dim, float *x, int64_t x_stride, float factor,
                  int num_threads) noexcept
    void kvc_mix(const kvc_kernels *kernels, int64_t n, int64_t outs, int64_t ins, int64_t dim, const float *shares,
                 const float *x, const float *base, float *out, int num_threads) noexcept
    void kvc_swiglu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float *out,
                    int num_threads) noexcept
    void kvc_geglu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float *out,
                   int num_threads) noexcept
    void kvc_layer_norm(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, int64_t x_stride,
                        const float *weight, const float *bias, float eps, float *out, int num_threads) noexcept
    void kvc_gelu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float *out,
                  int num_threads) noexcept
    void kvc_xielu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float positive, float negative,
                   float beta, float eps, float *out, int num_threads) noexcept
    void kvc_clamped_swiglu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float alpha,
                            float limit, float *out, int num_threads) noexcept
    void kvc_rotate(const kvc_kernels *kernels, int64_t n, int64_t heads, int64_t dim, int64_t turned, const float *x,
                    int64_t x_stride, const float *cos, const float *sin, float *out, int num_threads) noexcept
    void kvc_gate(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, int64_t x_stride,
                  const float *gates, int64_t gate_stride, int kind, float *out, int num_threads) noexcept
    void kvc_convolve(const kvc_kernels *kernels, const kvc_convolution *args, int num_threads) noexcept
    void kvc_scan_texts(const kvc_kernels *kernels, const kvc_scan *args, int num_threads) noexcept

cdef extern from "kvc_matrix.h" nogil:
    int kvc_matrix_init(kvc_matrix *matrix, kvc_matrix_format format, int64_t rows, int64_t columns) noexcept
    void kvc_matrix_put_words(const kvc_matrix *matrix, int64_t row, int64_t count, const void *words) noexcept
    void kvc_matrix_put_parts(const kvc_matrix *matrix, int64_t row, int64_t count, const kvc_parts *parts) noexcept
    void kvc_matrix_get_parts(const kvc_matrix *matrix, int64_t row, const kvc_parts *parts) noexcept
    void kvc_matrix_get_row(const kvc_matrix *matrix, int64_t row, float *values) noexcept
    void kvc_floats_of_bf16(int64_t n, const uint16_t *words, float *x) noexcept
    void kvc_bf16_of_floats(int64_t n, const float *x, uint16_t *words) noexcept

cdef extern from "kvc_sparse.h" nogil:
    ctypedef struct kvc_sparse_args:
        pass

    size_t kvc_sparse_scratch_bytes(const kvc_attend_args *args, const kvc_sparse_args *sparse,
                                    int num_threads) noexcept
    void kvc_attend_sparse(const kvc_kernels *kernels, const kvc_attend_args *args, const kvc_sparse_args *sparse,
                           void *scratch, int num_threads) noexcept

cdef extern from "kvc_indexer.h" nogil:
    ctypedef struct kvc_index_args:
        pass

    size_t kvc_index_scratch_bytes(const kvc_attend_args *args, const kvc_index_args *index, int num_threads) noexcept
    void kvc_index_tokens(const kvc_kernels *kernels, const kvc_attend_args *args, const kvc_index_args *index,
                          void *scratch, int num_threads) noexcept

cdef extern from "kvc_spill.h" nogil:
    ctypedef struct kvc_units:
        pass
    ctypedef enum kvc_use:
        pass
    ctypedef struct kvc_fault:
        pass
    ctypedef struct kvc_spill_stats:
        pass

    kvc_spill *kvc_spill_open(int fd, unsigned char *arena, int32_t num_layers, const size_t *block_bytes,
                              int32_t num_blocks, int block_size, size_t limit, size_t slot, int num_threads) noexcept
    void kvc_spill_close(kvc_spill *spill) noexcept
    size_t kvc_spill_bytes(const kvc_spill *spill) noexcept
    void kvc_spill_refer(kvc_spill *spill, const int32_t *references) noexcept
    int64_t kvc_hold(kvc_spill *spill, const kvc_units *units, kvc_use use) noexcept
    void kvc_release(kvc_spill *spill, const kvc_units *units, kvc_use use) noexcept
    void kvc_spoil(kvc_spill *spill, const kvc_units *units) noexcept
    int kvc_blank(kvc_spill *spill, int32_t layer, int32_t block) noexcept
    kvc_fault kvc_take_fault(kvc_spill *spill) noexcept
    int kvc_spill_expect_room(kvc_spill *spill) noexcept
    void kvc_spill_trim(kvc_spill *spill, int64_t used) noexcept
    kvc_spill_stats kvc_spill_count(kvc_spill *spill) noexcept
    const char *kvc_spill_check(kvc_spill *spill) noexcept
    int kvc_spill_state(kvc_spill *spill, int32_t layer, int32_t block) noexcept

cdef extern from *:
    """
    typedef const kvc_kernels *_Atomic kvc_shared_level;
    """
    ctypedef const kvc_kernels *shared_level "kvc_shared_level"    # as numbers of kvc_shared.h

cdef extern from "kvc_threads.h" nogil:
    void kvc_run_items(int64_t count, int num_threads, kvc_item_fn *item, void *context) noexcept
    void kvc_spin_little(int little) noexcept

# The table of storage formats, by name; the columns are explained in ckernels/kvc_formats.h.
Format = namedtuple("Format", ("name", "bits", "quantised", "fitted", "largest"))


cdef object _format(int number):
    cdef const kvc_format_info *line = kvc_format_of(<kvc_format>number)
    return Format(line.name.decode(), line.bits, line.quantised != 0, line.fitted != 0, line.largest.decode())


BITS_VERSION = KVC_BITS  # of ckernels/BITS.md: results of one version have the same bits on every CPU
FORMATS = {line.name: line for line in map(_format, range(KVC_NUM_FORMATS))}
cdef list _NAMES = list(FORMATS)
cdef object MAX_THREADS = 1024

# The state of the process: the level in use, and how many threads a call may use. A call reads each once.
cdef shared_level _active = NULL
cdef dict _bf16_rows = {}    # of each level that was asked: the system may permit tiles later, and bits would change
cdef shared_int32 _threads = min(MAX_THREADS, available_cpus())


# ---- For Cython: see kernels/kernels.pxd.

cdef int layout_init(kvc_layout *layout, int block_size, int num_heads, int head_dim, int value_head_dim,
                     kvc_format key_format, kvc_format value_format, int rotate_keys, int rotate_values,
                     int latent) noexcept nogil:
    return kvc_layout_init(layout, block_size, num_heads, head_dim, value_head_dim, key_format, value_format,
                           rotate_keys, rotate_values, latent)


cdef void write_runs(const kvc_layout *layout, unsigned char *arena, const kvc_run *runs,
                     int64_t num_runs, kvc_float_rows keys, kvc_float_rows values,
                     const kvc_head_keys *known, int threads) noexcept nogil:
    kvc_write_runs(_active, layout, arena, runs, num_runs, keys, values, known, threads)


cdef void gather_rows(const kvc_tensor *tensor, int64_t first, int64_t count, int heads, int dim,
                      float *rows) noexcept nogil:
    _active.gather_rows(tensor, first, count, heads, dim, rows)


cdef void read_runs(const kvc_layout *layout, const unsigned char *arena, const kvc_run *runs,
                    int64_t num_runs, float *keys, float *values, size_t token_stride,
                    size_t head_stride, const kvc_head_keys *known) noexcept nogil:
    _active.read_runs(layout, arena, runs, num_runs, keys, values, token_stride, head_stride, known)


cdef int64_t check_representable(const float *x, int64_t n, kvc_format format) noexcept nogil:
    return _active.check_representable(x, n, format)


cdef void copy_slots(const kvc_layout *layout, const unsigned char *src_arena, int32_t src_block, int src_slot,
                     unsigned char *dst_arena, int32_t dst_block, int dst_slot, int count) noexcept nogil:
    kvc_copy_slots(layout, src_arena, src_block, src_slot, dst_arena, dst_block, dst_slot, count)


cdef void clear_slots(const kvc_layout *layout, unsigned char *arena, int32_t block, int slot,
                      int count) noexcept nogil:
    kvc_clear_slots(layout, arena, block, slot, count)


cdef size_t attend_scratch_bytes(const kvc_layout *layout, const kvc_seq *seqs, const kvc_seq *residuals,
                                 int64_t num_seqs, int num_query_heads, int num_threads) noexcept nogil:
    return kvc_attend_scratch_bytes(layout, seqs, residuals, num_seqs, num_query_heads, num_threads)


cdef void attend(const kvc_attend_args *args, void *scratch, int num_threads) noexcept nogil:
    kvc_attend(_active, args, scratch, num_threads)


cdef size_t sparse_scratch_bytes(const kvc_attend_args *args, const void *sparse, int num_threads) noexcept nogil:
    return kvc_sparse_scratch_bytes(args, <const kvc_sparse_args *>sparse, num_threads)


cdef void attend_sparse(const kvc_attend_args *args, const void *sparse, void *scratch, int num_threads) noexcept nogil:
    kvc_attend_sparse(_active, args, <const kvc_sparse_args *>sparse, scratch, num_threads)


cdef kvc_spill *spill_open(int fd, unsigned char *arena, int32_t num_layers, const size_t *block_bytes,
                           int32_t num_blocks, int block_size, size_t limit, size_t slot, int threads) noexcept nogil:
    return kvc_spill_open(fd, arena, num_layers, block_bytes, num_blocks, block_size, limit, slot, threads)


cdef void spill_close(kvc_spill *spill) noexcept nogil:
    kvc_spill_close(spill)


cdef size_t spill_bytes(const kvc_spill *spill) noexcept nogil:
    return kvc_spill_bytes(spill)


cdef void spill_refer(kvc_spill *spill, const int32_t *references) noexcept nogil:
    kvc_spill_refer(spill, references)


cdef int64_t hold(kvc_spill *spill, const void *units, int use) noexcept nogil:
    return kvc_hold(spill, <const kvc_units *>units, <kvc_use>use)


cdef void release(kvc_spill *spill, const void *units, int use) noexcept nogil:
    kvc_release(spill, <const kvc_units *>units, <kvc_use>use)


cdef void spoil(kvc_spill *spill, const void *units) noexcept nogil:
    kvc_spoil(spill, <const kvc_units *>units)


cdef int blank(kvc_spill *spill, int32_t layer, int32_t block) noexcept nogil:
    return kvc_blank(spill, layer, block)


cdef void take_fault(kvc_spill *spill, void *fault) noexcept nogil:
    (<kvc_fault *>fault)[0] = kvc_take_fault(spill)


cdef int spill_expect_room(kvc_spill *spill) noexcept nogil:
    return kvc_spill_expect_room(spill)


cdef void spill_trim(kvc_spill *spill, int64_t used) noexcept nogil:
    kvc_spill_trim(spill, used)


cdef void spill_count(kvc_spill *spill, void *stats) noexcept nogil:
    (<kvc_spill_stats *>stats)[0] = kvc_spill_count(spill)


cdef const char *spill_check(kvc_spill *spill) noexcept nogil:
    return kvc_spill_check(spill)


cdef int spill_state(kvc_spill *spill, int32_t layer, int32_t block) noexcept nogil:
    return kvc_spill_state(spill, layer, block)


cdef size_t index_scratch_bytes(const kvc_attend_args *args, const void *index, int num_threads) noexcept nogil:
    return kvc_index_scratch_bytes(args, <const kvc_index_args *>index, num_threads)


cdef void index_tokens(const kvc_attend_args *args, const void *index, void *scratch, int num_threads) noexcept nogil:
    kvc_index_tokens(_active, args, <const kvc_index_args *>index, scratch, num_threads)


cdef void summarise_page(const kvc_layout *layout, const unsigned char *arena, int32_t block, int page,
                         const void *summaries) noexcept nogil:
    _active.summarise_page(layout, arena, block, page, summaries)


cdef int matrix_init(kvc_matrix *matrix, kvc_matrix_format format, int64_t rows, int64_t columns) noexcept nogil:
    return kvc_matrix_init(matrix, format, rows, columns)


cdef void matrix_put_words(const kvc_matrix *matrix, int64_t row, int64_t count, const void *words) noexcept nogil:
    kvc_matrix_put_words(matrix, row, count, words)


cdef void matrix_put_parts(const kvc_matrix *matrix, int64_t row, int64_t count,
                           const kvc_parts *parts) noexcept nogil:
    kvc_matrix_put_parts(matrix, row, count, parts)


cdef void matrix_get_parts(const kvc_matrix *matrix, int64_t row, const kvc_parts *parts) noexcept nogil:
    kvc_matrix_get_parts(matrix, row, parts)


cdef void matrix_get_row(const kvc_matrix *matrix, int64_t row, float *values) noexcept nogil:
    kvc_matrix_get_row(matrix, row, values)


cdef void floats_of_bf16(int64_t n, const uint16_t *words, float *x) noexcept nogil:
    kvc_floats_of_bf16(n, words, x)


cdef void bf16_of_floats(int64_t n, const float *x, uint16_t *words) noexcept nogil:
    kvc_bf16_of_floats(n, x, words)


cdef void quantise_weights(kvc_matrix_format format, int64_t count, int64_t columns, const float *x,
                           unsigned char *codes, uint16_t *scales, uint16_t *minima) noexcept nogil:
    _active.quantise_weights(format, count, columns, x, codes, scales, minima)


cdef const void *level_in_use(bint in_bf16, kvc_bf16_rows *rows) except NULL:
    cdef const kvc_kernels *level = _active
    rows[0] = KVC_BF16_FLOATS
    if in_bf16:
        key = <size_t>level
        if key not in _bf16_rows:
            _bf16_rows.setdefault(key, <int>kvc_bf16_rows_of(level))    # of two threads, the first one's
        rows[0] = <kvc_bf16_rows><int>_bf16_rows[key]
    return level


cdef size_t matmul_scratch_bytes(const kvc_matmul_args *args, int threads) noexcept nogil:
    return kvc_matmul_scratch_bytes(args, threads)


cdef void matmul(const void *level, const kvc_matmul_args *args, int num_threads) noexcept nogil:
    kvc_matmul(<const kvc_kernels *>level, args, num_threads)


cdef void rms_norm(int64_t n, int64_t heads, int64_t dim, const float *x, int64_t x_stride, const float *weight,
                   float eps, float *out) noexcept nogil:
    kvc_rms_norm(_active, n, heads, dim, x, x_stride, weight, eps, out, _threads)


cdef void layer_norm(int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *weight, const float *bias,
                     float eps, float *out) noexcept nogil:
    kvc_layer_norm(_active, n, dim, x, x_stride, weight, bias, eps, out, _threads)


cdef void thin(int64_t n, int64_t dim, float *x, int64_t x_stride, float factor) noexcept nogil:
    kvc_thin(_active, n, dim, x, x_stride, factor, _threads)


cdef void mix(int64_t n, int64_t outs, int64_t ins, int64_t dim, const float *shares, const float *x, const float *base,
              float *out) noexcept nogil:
    kvc_mix(_active, n, outs, ins, dim, shares, x, base, out, _threads)


cdef void swiglu(int64_t n, int64_t dim, const float *x, float *out) noexcept nogil:
    kvc_swiglu(_active, n, dim, x, out, _threads)


cdef void geglu(int64_t n, int64_t dim, const float *x, float *out) noexcept nogil:
    kvc_geglu(_active, n, dim, x, out, _threads)


cdef void gelu(int64_t n, int64_t dim, const float *x, float *out) noexcept nogil:
    kvc_gelu(_active, n, dim, x, out, _threads)


cdef void xielu(int64_t n, int64_t dim, const float *x, float positive, float negative, float beta, float eps,
                float *out) noexcept nogil:
    kvc_xielu(_active, n, dim, x, positive, negative, beta, eps, out, _threads)


cdef void clamped_swiglu(int64_t n, int64_t dim, const float *x, float alpha, float limit, float *out) noexcept nogil:
    kvc_clamped_swiglu(_active, n, dim, x, alpha, limit, out, _threads)


cdef void softcap(int64_t n, const float *x, float cap, float *out) noexcept nogil:
    _active.softcap(n, x, cap, out)


cdef uint64_t shares(int64_t n, const float *x, float most, float factor, uint64_t *out) noexcept nogil:
    return _active.shares(n, x, most, factor, out)


cdef void turns(int64_t n, int64_t pairs, const int64_t *positions, const double *frequencies, double scale,
                float *cosines, float *sines) noexcept nogil:
    kvc_turns(n, pairs, positions, frequencies, scale, cosines, sines)


cdef double power(double x, double y) noexcept nogil:
    return kvc_power(x, y)


cdef void product(int64_t n, int64_t k, int64_t m, const double *a, const double *b, double *out) noexcept nogil:
    kvc_product(n, k, m, a, b, out)


cdef void merge(int64_t n, int64_t heads, int64_t dim, const int64_t *starts, const int64_t *chosen, float *parts,
                float *logs, float *mixed, float *masses) noexcept nogil:
    kvc_merge(n, heads, dim, starts, chosen, parts, logs, mixed, masses)


cdef double_function *function_of(function which) noexcept nogil:
    if which == EXP:
        return &kvc_exp
    if which == EXP2:
        return &kvc_exp2
    if which == LOG:
        return &kvc_log
    if which == LOG1P:
        return &kvc_log1p
    if which == SIN:
        return &kvc_sin
    return &kvc_cos if which == COS else &kvc_tanh


cdef void rotate(int64_t n, int64_t heads, int64_t dim, int64_t turned, const float *x, int64_t x_stride,
                 const float *cos, const float *sin, float *out) noexcept nogil:
    kvc_rotate(_active, n, heads, dim, turned, x, x_stride, cos, sin, out, _threads)


cdef void gate(int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *gates, int64_t gate_stride,
               int kind, float *out) noexcept nogil:
    kvc_gate(_active, n, dim, x, x_stride, gates, gate_stride, kind, out, _threads)


cdef void convolve(const kvc_convolution *args) noexcept nogil:
    kvc_convolve(_active, args, _threads)


cdef void scan(const kvc_scan *args) noexcept nogil:
    kvc_scan_texts(_active, args, _threads)


cdef void decays(int64_t n, int64_t heads, const float *x, int64_t x_stride, const float *bias, const float *rate,
                 float least, float most, float *steps, float *out) noexcept nogil:
    _active.decays(n, heads, x, x_stride, bias, rate, least, most, steps, out)


cdef void bounded_decays(int64_t n, int64_t channels, const float *x, int64_t x_stride, const float *bias,
                         const float *rate, float bound, float *out) noexcept nogil:
    _active.bounded_decays(n, channels, x, x_stride, bias, rate, bound, out)


cdef void digest(int64_t n, const unsigned char *data, const uint32_t *key, uint64_t *out) noexcept nogil:
    _active.digest(n, data, key, out)


cdef int num_threads() noexcept nogil:
    return _threads


cdef void run_items(int64_t count, int num_threads, kvc_item_fn *item, void *context) noexcept nogil:
    kvc_run_items(count, num_threads, item, context)


cdef int format_code(object name, str what) except -1:
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"{what}: expected one of {', '.join(FORMATS)}, got {name!r:.100}{spelled(name, FORMATS)}")
    return _NAMES.index(name)


cdef class Layout:
    def __init__(self, int block_size, int num_heads, int head_dim, key_format="f32", value_format="f32",
                 bint rotate_keys=False, bint rotate_values=False, value_head_dim=None, bint latent=False):
        cdef int values = head_dim if value_head_dim is None else value_head_dim
        cdef int key = format_code(key_format, "key_format"), value = format_code(value_format, "value_format")
        if layout_init(&self.c, block_size, num_heads, head_dim, values, <kvc_format>key, <kvc_format>value,
                       rotate_keys, rotate_values, latent) < 0:
            raise ValueError(
                f"layout: expected block_size 1 to {KVC_MAX_BLOCK_SIZE}, num_heads >= 1, head_dim a multiple of 8 up "
                f"to {KVC_MOST_CHANNELS} (a power of two where rotated), only quantised formats rotated, latent rows "
                f"of one head that are at least as wide as V and of the same format, got "
                f"{block_size}, {num_heads}, {head_dim}, {key_format}, {value_format}, "
                f"rotate_keys={rotate_keys}, rotate_values={rotate_values}, value_head_dim={values}, latent={latent}")

    @property
    def block_size(self):
        return self.c.block_size

    @property
    def num_heads(self):
        return self.c.num_heads

    @property
    def head_dim(self):
        return self.c.head_dim

    @property
    def value_head_dim(self):
        return self.c.value_head_dim

    @property
    def key_head_bytes(self):
        return self.c.key_head_bytes

    @property
    def value_head_bytes(self):
        return self.c.value_head_bytes

    @property
    def block_bytes(self):
        return self.c.block_bytes


# ---- For Python: levels and threads.

def simd_level():
    """The SIMD level in use, as the table of kernels in use names itself."""
    return _active.name.decode()


def best_level():
    """The level that this CPU runs best, also where this build has left it out: see setup.py, KVCACHE_LEVELS."""
    return kvc_best_level().decode()


def simd_levels():
    """All levels that this build and this CPU can run, best first; "scalar" is always the last."""
    return tuple(kvc_level(i).name.decode() for i in range(kvc_num_levels()))


def bf16_order():
    """The order of sums of `activations="bf16"` at the level in use: bits depend on it.

    "rounded", that of floats; or that of an instruction, "pairs" (AMD's CPUs with AVX-512), "tiles" (AMX, if the system
    permits them, which is asked for here or at the first such product) or "quads" (i8mm). ckernels/kvc_matrix.h defines
    them.
    """
    cdef kvc_bf16_rows rows
    level_in_use(True, &rows)
    names = {KVC_BF16_ROUNDED: "rounded", KVC_BF16_PAIRS: "pairs", KVC_BF16_TILES: "tiles", KVC_BF16_QUADS: "quads"}
    return names[rows]


cdef int _use_level(object level, str what) except -1:
    global _active
    cdef const kvc_kernels *found = NULL
    if isinstance(level, str):
        name = level.encode()
        found = kvc_find_level(name)
    if found == NULL:
        raise ValueError(f"{what}: expected a level of this CPU, one of {', '.join(simd_levels())}, got {level!r:.100}")
    _active = found
    return 0


@contextmanager
def use_simd(level):
    """Inside the `with` block the whole process runs the kernels of `level`.

    A call that runs ends with the level that it began with. Blocks of several threads must not overlap: the last one
    to end restores the level that it found.
    """
    before = simd_level()
    _use_level(level, "level")
    try:
        yield
    finally:
        _use_level(before, "level")


def get_num_threads():
    """Threads that one call may use."""
    return num_threads()


def set_num_threads(n):
    """Let one call use at most `n` threads, 1 to 1024. By default as many as CPUs that the process may use.

    It is a number of the whole process; a call that runs keeps the one that it began with.
    """
    global _threads
    _threads = as_count(n, "n", 1, MAX_THREADS)


def _read_environment(environ):
    _use_level(environ.get("KVCACHE_SIMD") or simd_levels()[0], "KVCACHE_SIMD")
    threads = environ.get("KVCACHE_NUM_THREADS", "")
    if threads:
        try:
            set_num_threads(int(threads))
        except ValueError:
            raise ValueError(f"KVCACHE_NUM_THREADS: expected 1 to {MAX_THREADS}, got {threads!r:.100}") from None


_read_environment(os.environ)
kvc_spin_little(has_quota())
