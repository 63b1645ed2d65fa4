"""The kernels for the rest of the library: how a block is laid out, and the operations on it.

Everything here runs without the GIL on validated input: block ids inside the arena, first <= stop <=
block_size, counts that agree. Nothing allocates: attend's caller gives it attend_scratch_bytes of scratch.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t


cdef extern from "kvc_spill.h" nogil:
    ctypedef struct kvc_spill:      # kernels/spill_units.pxd has what is done with it
        pass

cdef extern from "kvc.h" nogil:
    ctypedef enum kvc_format:       # a line of the table in kvc_formats.h
        KVC_NUM_FORMATS

    ctypedef struct kvc_format_info:
        const char *name
        int bits                    # of one value
        int quantised               # 1: codes with a scale and a minimum per row; 0: floats
        int fitted                  # 1: scale and minimum of least squared error
        const char *largest         # magnitude that it can hold, as text

    const kvc_format_info *kvc_format_of(kvc_format format) noexcept

    enum:
        KVC_MAX_BLOCK_SIZE, KVC_MAX_HEAD_DIM, KVC_MOST_CHANNELS

    ctypedef struct kvc_run:        # consecutive tokens in slots [first, stop) of one block
        int32_t block
        uint16_t first
        uint16_t stop

    ctypedef struct kvc_layout:     # how the bytes of one block of one layer lie
        int32_t block_size
        int32_t num_heads           # KV heads
        int32_t head_dim            # of K and of queries
        int32_t value_head_dim      # of V and of the output
        kvc_format key_format
        kvc_format value_format
        int32_t rotate_keys         # stored under a Hadamard rotation of the head
        int32_t rotate_values
        int32_t latent              # V is the first channels of K
        size_t key_head_bytes       # one KV head's K of one block
        size_t value_head_bytes
        size_t block_bytes          # all heads, K and V; a multiple of 64

    ctypedef struct kvc_head_keys:    # what is known of the keys of one head; NULL: nothing
        const float *centre         # (head_dim), subtracted from what is stored
        const float *factor         # (head_dim, head_dim), steers the rounding

    ctypedef enum kvc_element:
        KVC_ELEMENT_F32, KVC_ELEMENT_F16, KVC_ELEMENT_BF16, KVC_ELEMENT_F64

    ctypedef struct kvc_tensor:     # rows (tokens, heads, head_dim) of K, V or queries, channels together
        const unsigned char *data
        int64_t token_stride        # in bytes, of any sign
        int64_t head_stride
        kvc_element element

    enum:
        KVC_GATE_SIGMOID
        KVC_GATE_SILU
        KVC_GATE_SOFTPLUS
        KVC_STATE_COLUMNS

    ctypedef struct kvc_texts:      # of layers with a state; explained in ckernels/kvc_recurrence.h
        int64_t count
        const int64_t *starts
        const int64_t *index
        float *states
        int64_t slot_floats

    ctypedef struct kvc_convolution:
        kvc_texts texts
        int64_t channels, taps, x_stride
        const float *x
        const float *weight
        const float *bias
        int silu
        float *out

    ctypedef struct kvc_scan:
        kvc_texts texts
        int64_t heads, groups, size, dim
        const float *keys
        const float *queries
        const float *values
        int64_t key_stride, value_stride
        const float *decays
        const float *steps
        const float *skip
        int tiled, by_channel
        float *out

    ctypedef struct kvc_float_rows:     # rows (tokens, heads, channels) of K or V: heads and channels together
        const float *data               # NULL: no rows
        int64_t stride                  # in floats, from token to token

    ctypedef struct kvc_seq:        # one sequence of an attention call
        const kvc_run *runs
        int64_t num_runs
        int64_t num_tokens          # the sum of the runs
        int64_t sink_tokens         # these first tokens meet the sink queries
        int64_t num_queries         # standing on the last tokens
        int64_t hidden_tokens       # the number of these that no query sees
        int64_t skipped_tokens      # the number of tokens at the front that no query sees
        int64_t start               # the text position of the first token
        int64_t window              # 0, or positions that a query sees, its own included
        int64_t ahead               # tokens after its own that a query sees too
        int32_t chunked             # 1: those from the last multiple of window on, up to its own
        int32_t whole               # 1: every query sees all tokens that are not hidden
        const int64_t *parents      # NULL, or a tree: of each query its parent, or -1
        const int64_t *depths       # and its number of ancestors
        const int64_t *firsts       # NULL, or of each query the number of first tokens that it does not see, ascending

    ctypedef struct kvc_attend_args:    # softmax(q K^T * scale) V
        const kvc_layout *layout
        const unsigned char *arena      # of one layer
        const kvc_seq *seqs
        int64_t num_seqs
        int32_t num_query_heads
        float scale
        kvc_tensor queries              # (total_queries, num_query_heads, head_dim)
        kvc_tensor sink_queries         # the same shape; data is NULL where there are none
        float *out                      # (total_queries, num_query_heads, value_head_dim)
        float *scores                   # (total shown tokens), or NULL
        float *lse                      # (total_queries, num_query_heads), or NULL
        float softcap                   # 0: none
        const float *sinks              # (num_query_heads), or NULL
        int64_t sink_stride             # 0, or num_query_heads: sinks of each query
        int64_t score_stride            # 0, or of scores (num_heads, score_stride): of each KV head
        const kvc_head_keys *known      # (num_heads), whose centres the keys in `arena` lack; or NULL
        const kvc_seq *residuals        # (num_seqs), further tokens of each context, in the next two; or NULL
        const kvc_layout *residual_layout
        const unsigned char *residual_arena
        kvc_spill *spill                # where blocks of `arena` lie that are not in memory; or NULL
        int32_t spill_layer


cdef extern from "kvc_matrix.h" nogil:
    enum:
        KVC_PANEL                       # rows of a matrix that lie together

    ctypedef enum kvc_matrix_format:    # a line of its table
        KVC_MATRIX_F32, KVC_MATRIX_F16, KVC_MATRIX_BF16, KVC_NUM_MATRIX_FORMATS

    ctypedef enum kvc_scales:           # how scales are stored
        KVC_HALVES, KVC_BYTES, KVC_NIBBLES, KVC_E8M0, KVC_E4M3

    ctypedef enum kvc_table:
        KVC_NO_TABLE

    ctypedef struct kvc_matrix_format_info:
        const char *name
        int bits                        # of a float, or of a code
        int packed                      # 1: codes with scales; 0: floats
        int has_minima
        int zero                        # the code or the number of 0
        int channels                    # that share a scale
        kvc_scales scales
        kvc_table table                 # of the numbers that codes stand for

    const kvc_matrix_format_info *kvc_matrix_format_of(kvc_matrix_format format) noexcept
    const unsigned char *kvc_table_of(kvc_table table) noexcept
    int kvc_groups_per_record(const kvc_matrix_format_info *info) noexcept
    bint kvc_has_units(const kvc_matrix_format_info *info) noexcept
    bint kvc_quantises(const kvc_matrix_format_info *info) noexcept

    ctypedef struct kvc_parts:          # rows of a packed format
        unsigned char *codes
        void *scales
        void *minima
        float *units

    ctypedef struct kvc_matrix:
        kvc_matrix_format format
        int64_t rows, columns, panels, groups
        size_t panel_bytes
        unsigned char *data

    ctypedef enum kvc_bf16_rows:        # how rows meet weights in bf16
        KVC_BF16_FLOATS
        KVC_BF16_ROUNDED
        KVC_BF16_PAIRS
        KVC_BF16_TILES
        KVC_BF16_QUADS

    # out (n, rows) = x (n, columns) times the matrix transposed, plus bias and, with add, what it has
    ctypedef struct kvc_matmul_args:
        const kvc_matrix *matrix
        const float *x
        const float *bias
        float *out
        int64_t n
        int add
        int digits                      # of activations that meet packed weights: 1 or 2
        kvc_bf16_rows bf16_rows
        unsigned char *prepared


cdef extern from "kvc_threads.h" nogil:
    ctypedef void kvc_item_fn(void *context, int64_t index, int thread) noexcept nogil


# 0, or -1 where the sizes or formats are not supported.
cdef int layout_init(kvc_layout *layout, int block_size, int num_heads, int head_dim, int value_head_dim,
                     kvc_format key_format, kvc_format value_format, int rotate_keys, int rotate_values,
                     int latent) noexcept nogil

# Float rows (tokens of the runs in order, num_heads, head_dim of the side) into slots and back. NULL: that side is left
# alone. Strides are in floats. known: of each head, or NULL. On several threads runs of one block follow one another.
cdef void write_runs(const kvc_layout *layout, unsigned char *arena, const kvc_run *runs,
                     int64_t num_runs, kvc_float_rows keys, kvc_float_rows values,
                     const kvc_head_keys *known, int threads) noexcept nogil
# Tokens of a tensor of any element kind and strides as float rows.
cdef void gather_rows(const kvc_tensor *tensor, int64_t first, int64_t count, int heads, int dim,
                      float *rows) noexcept nogil
cdef void read_runs(const kvc_layout *layout, const unsigned char *arena, const kvc_run *runs,
                    int64_t num_runs, float *keys, float *values, size_t token_stride,
                    size_t head_stride, const kvc_head_keys *known) noexcept nogil

# The first value that is not finite or that the format cannot hold, or -1.
cdef int64_t check_representable(const float *x, int64_t n, kvc_format format) noexcept nogil

# Moves stored tokens bit for bit, also between arenas of one layout. Inside one block the slots may overlap.
cdef void copy_slots(const kvc_layout *layout, const unsigned char *src_arena, int32_t src_block, int src_slot,
                     unsigned char *dst_arena, int32_t dst_block, int dst_slot, int count) noexcept nogil

# Slots become rows of zeros.
cdef void clear_slots(const kvc_layout *layout, unsigned char *arena, int32_t block, int slot,
                      int count) noexcept nogil

# Attention; scratch has attend_scratch_bytes.
cdef size_t attend_scratch_bytes(const kvc_layout *layout, const kvc_seq *seqs, const kvc_seq *residuals,
                                 int64_t num_seqs, int num_query_heads, int num_threads) noexcept nogil
cdef void attend(const kvc_attend_args *args, void *scratch, int num_threads) noexcept nogil

# Products with weights: kvc_matrix.h. quantise_weights fills codes (count, columns), scales and minima (count, groups).
cdef int matrix_init(kvc_matrix *matrix, kvc_matrix_format format, int64_t rows, int64_t columns) noexcept nogil
cdef void matrix_put_words(const kvc_matrix *matrix, int64_t row, int64_t count, const void *words) noexcept nogil
cdef void matrix_put_parts(const kvc_matrix *matrix, int64_t row, int64_t count, const kvc_parts *parts) noexcept nogil
cdef void matrix_get_parts(const kvc_matrix *matrix, int64_t row, const kvc_parts *parts) noexcept nogil
cdef void matrix_get_row(const kvc_matrix *matrix, int64_t row, float *values) noexcept nogil
cdef void floats_of_bf16(int64_t n, const uint16_t *words, float *x) noexcept nogil
cdef void bf16_of_floats(int64_t n, const float *x, uint16_t *words) noexcept nogil    # rounded half to even
cdef void quantise_weights(kvc_matrix_format format, int64_t count, int64_t columns, const float *x,
                           unsigned char *codes, uint16_t *scales, uint16_t *minima) noexcept nogil
# The level in use, for `matmul`, and if asked for its fastest way of rows in bf16; it may change after this.
cdef const void *level_in_use(bint in_bf16, kvc_bf16_rows *rows) except NULL
cdef size_t matmul_scratch_bytes(const kvc_matmul_args *args, int threads) noexcept nogil
cdef void matmul(const void *level, const kvc_matmul_args *args, int num_threads) noexcept nogil

# Rows between two products, divided among the threads: kvc_network_parallel.c.
cdef void rms_norm(int64_t n, int64_t heads, int64_t dim, const float *x, int64_t x_stride, const float *weight,
                   float eps, float *out) noexcept nogil
cdef void layer_norm(int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *weight, const float *bias,
                     float eps, float *out) noexcept nogil
cdef void thin(int64_t n, int64_t dim, float *x, int64_t x_stride, float factor) noexcept nogil
cdef void mix(int64_t n, int64_t outs, int64_t ins, int64_t dim, const float *shares, const float *x, const float *base,
              float *out) noexcept nogil
cdef void swiglu(int64_t n, int64_t dim, const float *x, float *out) noexcept nogil
cdef void geglu(int64_t n, int64_t dim, const float *x, float *out) noexcept nogil
cdef void gelu(int64_t n, int64_t dim, const float *x, float *out) noexcept nogil
cdef void xielu(int64_t n, int64_t dim, const float *x, float positive, float negative, float beta, float eps,
                float *out) noexcept nogil
cdef void clamped_swiglu(int64_t n, int64_t dim, const float *x, float alpha, float limit, float *out) noexcept nogil
cdef void softcap(int64_t n, const float *x, float cap, float *out) noexcept nogil

# Weights of tokens as whole numbers (kvc_shares.c), at the level in use; functions of doubles (kvc_functions.h), the
# same at all levels.
ctypedef double double_function(double x) noexcept nogil
ctypedef enum function:
    EXP, EXP2, LOG, LOG1P, SIN, COS, TANH
cdef uint64_t shares(int64_t n, const float *x, float most, float factor, uint64_t *out) noexcept nogil
cdef double power(double x, double y) noexcept nogil
cdef void product(int64_t n, int64_t k, int64_t m, const double *a, const double *b, double *out) noexcept nogil
cdef double_function *function_of(function which) noexcept nogil
cdef void turns(int64_t n, int64_t pairs, const int64_t *positions, const double *frequencies, double scale,
                float *cosines, float *sines) noexcept nogil

cdef void rotate(int64_t n, int64_t heads, int64_t dim, int64_t turned, const float *x, int64_t x_stride,
                 const float *cos, const float *sin, float *out) noexcept nogil

cdef void gate(int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *gates, int64_t gate_stride,
               int kind, float *out) noexcept nogil

# Layers with a state, divided among the threads: kvc_recurrence_parallel.c. The sizes of steps on this thread.
cdef void convolve(const kvc_convolution *args) noexcept nogil
cdef void scan(const kvc_scan *args) noexcept nogil
cdef void decays(int64_t n, int64_t heads, const float *x, int64_t x_stride, const float *bias, const float *rate,
                 float least, float most, float *steps, float *out) noexcept nogil
cdef void bounded_decays(int64_t n, int64_t channels, const float *x, int64_t x_stride, const float *bias,
                         const float *rate, float bound, float *out) noexcept nogil

# NH of n bytes: 4 sums for each 1024 of them or a part, under a key of 262 words (ckernels/kvc_digest.c).
cdef void digest(int64_t n, const unsigned char *data, const uint32_t *key, uint64_t *out) noexcept nogil

# What set_num_threads() or KVCACHE_NUM_THREADS say, else the CPUs this process may use.
cdef int num_threads() noexcept nogil

# item(context, i, thread) for each i in [0, count), on the caller, which runs item 0, and threads of the pool.
cdef void run_items(int64_t count, int num_threads, kvc_item_fn *item, void *context) noexcept nogil

# The number of the format of this name; ValueError lists the names that there are.
cdef int format_code(object name, str what) except -1


cdef class Layout:
    """A kvc_layout with a Python face: its sizes as properties."""
    cdef kvc_layout c


# Attention where queries choose tokens, and summaries of keys: over the types of kernels/sparse.pxd,
# kvc_sparse_args and kvc_summaries. Scratch has sparse_scratch_bytes. Makes summaries that are missing.
cdef size_t sparse_scratch_bytes(const kvc_attend_args *args, const void *sparse, int num_threads) noexcept nogil
cdef void attend_sparse(const kvc_attend_args *args, const void *sparse, void *scratch, int num_threads) noexcept nogil
cdef void summarise_page(const kvc_layout *layout, const unsigned char *arena, int32_t block, int page,
                         const void *summaries) noexcept nogil

# The choice of an indexer, over kvc_index_args of kernels/sparse.pxd. Scratch has index_scratch_bytes.
cdef size_t index_scratch_bytes(const kvc_attend_args *args, const void *index, int num_threads) noexcept nogil
cdef void index_tokens(const kvc_attend_args *args, const void *index, void *scratch, int num_threads) noexcept nogil

# Results of parts of a context, merged: kvc_merge.h.
cdef void merge(int64_t n, int64_t heads, int64_t dim, const int64_t *starts, const int64_t *chosen, float *parts,
                float *logs, float *mixed, float *masses) noexcept nogil

# Blocks that lie in memory or in a file, over kvc_units, kvc_fault and kvc_spill_stats of kernels/spill_units.pxd.
cdef kvc_spill *spill_open(int fd, unsigned char *arena, int32_t num_layers, const size_t *block_bytes,
                           int32_t num_blocks, int block_size, size_t limit, size_t slot, int threads) noexcept nogil
cdef void spill_close(kvc_spill *spill) noexcept nogil
cdef size_t spill_bytes(const kvc_spill *spill) noexcept nogil
cdef void spill_refer(kvc_spill *spill, const int32_t *references) noexcept nogil
cdef int64_t hold(kvc_spill *spill, const void *units, int use) noexcept nogil
cdef void release(kvc_spill *spill, const void *units, int use) noexcept nogil
cdef void spoil(kvc_spill *spill, const void *units) noexcept nogil
cdef int blank(kvc_spill *spill, int32_t layer, int32_t block) noexcept nogil
cdef void take_fault(kvc_spill *spill, void *fault) noexcept nogil
cdef int spill_expect_room(kvc_spill *spill) noexcept nogil
cdef void spill_trim(kvc_spill *spill, int64_t used) noexcept nogil
cdef void spill_count(kvc_spill *spill, void *stats) noexcept nogil
cdef const char *spill_check(kvc_spill *spill) noexcept nogil
cdef int spill_state(kvc_spill *spill, int32_t layer, int32_t block) noexcept nogil
