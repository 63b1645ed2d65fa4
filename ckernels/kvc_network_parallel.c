/* kvc_network_parallel.c - norms, gates and rotations (kvc_network.c) on several threads: rows are divided among them. */
#include "kvc.h"
#include "kvc_threads.h"

enum { VALUES_PER_ITEM = 1 << 14 }; /* some 5 us of work; fewer are computed faster than another thread begins */

typedef struct call {
    const kvc_kernels *kernels;
    int64_t n, rows_per_item, heads, dim, turned, x_stride, gate_stride; /* strides: floats between rows of x, of gates */
    int64_t ins;                                                        /* of a mix, whose outs are `heads` */
    const float *x, *weight, *bias, *cos, *sin, *gates, *shares, *base; /* no bias: an RMSNorm */
    int kind; /* of gates */
    float eps, alpha, limit, positive, negative, beta, *out;
    void (*gate)(int64_t n, int64_t dim, const float *x, float *out);
} call;

/* The rows of an item: the first, and how many. */
typedef struct rows {
    int64_t first, count;
} rows;

static rows rows_of(const call *c, int64_t index) {
    const int64_t first = index * c->rows_per_item, left = c->n - first;
    return (rows){first, left < c->rows_per_item ? left : c->rows_per_item};
}

static void norm_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const rows r = rows_of(c, index);
    (void)thread;
    if (c->bias) {
        c->kernels->layer_norm(r.count, c->dim, c->x + r.first * c->x_stride, c->x_stride, c->weight, c->bias, c->eps,
                               c->out + r.first * c->dim);
        return;
    }
    c->kernels->rms_norm(r.count, c->heads, c->dim, c->x + r.first * c->x_stride, c->x_stride, c->weight, c->eps,
                         c->out + r.first * c->heads * c->dim);
}

static void gate_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const rows r = rows_of(c, index);
    const float *x = c->x + r.first * c->x_stride;
    float *out = c->out + r.first * c->dim;
    (void)thread;
    if (c->gate)
        c->gate(r.count, c->dim, x, out);
    else
        c->kernels->clamped_swiglu(r.count, c->dim, x, c->alpha, c->limit, out);
}

static void xielu_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const rows r = rows_of(c, index);
    (void)thread;
    c->kernels->xielu(r.count, c->dim, c->x + r.first * c->dim, c->positive, c->negative, c->beta, c->eps,
                      c->out + r.first * c->dim);
}

static void thin_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const rows r = rows_of(c, index);
    (void)thread;
    c->kernels->thin(r.count, c->dim, c->out + r.first * c->x_stride, c->x_stride, c->limit);
}

static void mix_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const rows r = rows_of(c, index);
    const int64_t first = r.first * c->heads * c->dim;
    (void)thread;
    c->kernels->mix(r.count, c->heads, c->ins, c->dim, c->shares + r.first * c->heads * c->ins,
                    c->x + r.first * c->ins * c->dim, c->base + first, c->out + first);
}

static void rotate_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const rows r = rows_of(c, index);
    const int64_t angles = r.first * (c->turned / 2);
    (void)thread;
    c->kernels->rotate(r.count, c->heads, c->dim, c->turned, c->x + r.first * c->x_stride, c->x_stride, c->cos + angles,
                       c->sin + angles, c->out + r.first * c->heads * c->dim);
}

static void gates_item(void *context, int64_t index, int thread) {
    const call *c = context;
    const rows r = rows_of(c, index);
    (void)thread;
    c->kernels->gate(r.count, c->dim, c->x + r.first * c->x_stride, c->x_stride, c->gates + r.first * c->gate_stride,
                     c->gate_stride, c->kind, c->out + r.first * c->dim);
}

static void run(call c, kvc_item_fn *item, int num_threads) {
    const int64_t values = c.heads * c.dim, most = VALUES_PER_ITEM / (values > 0 ? values : 1);
    num_threads = kvc_threads_worth(KVC_COMPUTING, c.n * values, num_threads);
    c.rows_per_item = num_threads == 1 || c.n < 1 ? c.n + 1 : most > 1 ? most : 1;
    const int64_t items = (c.n + c.rows_per_item - 1) / c.rows_per_item;
    kvc_run_work(KVC_COMPUTING, c.n * values, items > 1 ? items : 1, items > 1 ? num_threads : 1, item, &c);
}

void kvc_rms_norm(const kvc_kernels *kernels, int64_t n, int64_t heads, int64_t dim, const float *x, int64_t x_stride,
                  const float *weight, float eps, float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = heads, .dim = dim, .x = x, .x_stride = x_stride, .weight = weight,
               .eps = eps, .out = out}, norm_item, num_threads);
}

void kvc_layer_norm(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, int64_t x_stride,
                    const float *weight, const float *bias, float eps, float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = 1, .dim = dim, .x = x, .x_stride = x_stride, .weight = weight,
               .bias = bias, .eps = eps, .out = out}, norm_item, num_threads);
}

void kvc_thin(const kvc_kernels *kernels, int64_t n, int64_t dim, float *x, int64_t x_stride, float factor,
              int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = 1, .dim = dim, .x_stride = x_stride, .limit = factor, .out = x},
        thin_item, num_threads);
}

void kvc_mix(const kvc_kernels *kernels, int64_t n, int64_t outs, int64_t ins, int64_t dim, const float *shares,
             const float *x, const float *base, float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = outs, .ins = ins, .dim = dim, .shares = shares, .x = x, .base = base,
               .out = out}, mix_item, num_threads);
}

void kvc_swiglu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = 1, .dim = dim, .x = x, .x_stride = 2 * dim, .out = out,
               .gate = kernels->swiglu}, gate_item, num_threads);
}

void kvc_geglu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = 1, .dim = dim, .x = x, .x_stride = 2 * dim, .out = out,
               .gate = kernels->geglu}, gate_item, num_threads);
}

void kvc_gelu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = 1, .dim = dim, .x = x, .x_stride = dim, .out = out,
               .gate = kernels->gelu}, gate_item, num_threads);
}

void kvc_xielu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float positive, float negative,
               float beta, float eps, float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = 1, .dim = dim, .x = x, .positive = positive, .negative = negative,
               .beta = beta, .eps = eps, .out = out}, xielu_item, num_threads);
}

void kvc_clamped_swiglu(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, float alpha, float limit,
                        float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = 1, .dim = dim, .x = x, .x_stride = 2 * dim, .alpha = alpha,
               .limit = limit, .out = out}, gate_item, num_threads);
}

void kvc_rotate(const kvc_kernels *kernels, int64_t n, int64_t heads, int64_t dim, int64_t turned, const float *x,
                int64_t x_stride, const float *cos, const float *sin, float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = heads, .dim = dim, .turned = turned, .x = x, .x_stride = x_stride,
               .cos = cos, .sin = sin, .out = out}, rotate_item, num_threads);
}

void kvc_gate(const kvc_kernels *kernels, int64_t n, int64_t dim, const float *x, int64_t x_stride, const float *gates,
              int64_t gate_stride, int kind, float *out, int num_threads) {
    run((call){.kernels = kernels, .n = n, .heads = 1, .dim = dim, .x = x, .x_stride = x_stride, .gates = gates,
               .gate_stride = gate_stride, .kind = kind, .out = out}, gates_item, num_threads);
}
