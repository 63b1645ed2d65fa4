/* kvc_matmul_packed.c - prepared rows times packed panels of a matrix (kvc_matrix.h, kvc_matmul.c), tile by tile
 * (kvc_packed_tiles.h).
 */
#include "kvc_packed.h"

enum { CHUNK_BYTES = 2 << 20 /* of prepared rows that a panel meets */ };

typedef void packed_fn(const kvc_matrix *, const unsigned char *x, tile *);
#define DECLARE(format, digits, rows) packed_fn PACKED_TILE(format, digits, rows);
#define DECLARE_ALL(format) ONE_DIGIT(DECLARE, format) TWO_DIGITS(DECLARE, format)
PACKED_FORMATS(DECLARE_ALL)

#define LINE(format, digits, rows) [rows] = PACKED_TILE(format, digits, rows),
#define TABLE(format) [KVC_MATRIX_##format] = {{ONE_DIGIT(LINE, format)}, {TWO_DIGITS(LINE, format)}},
/* Formats that differ in nothing but the numbers of their tables share tiles. */
static packed_fn *const packed_tiles[KVC_NUM_MATRIX_FORMATS][2][9] = {
    PACKED_FORMATS(TABLE)[KVC_MATRIX_IQ3_S] = {{ONE_DIGIT(LINE, IQ4_XS)}, {TWO_DIGITS(LINE, IQ4_XS)}},
    [KVC_MATRIX_IQ3_XXS] = {{ONE_DIGIT(LINE, IQ4_XS)}, {TWO_DIGITS(LINE, IQ4_XS)}},
};

/* The results of panels [panel, panel_stop) for the rows behind the tiled ones. */
void KVC_OWN(multiply_packed)(const kvc_matmul_args *args, int64_t panel, int64_t panel_stop, float *scratch) {
    const size_t row_bytes = kvc_prepared_row_bytes(args);
    packed_fn *const *tiles = packed_tiles[args->matrix->format][args->digits - 1];
    const int most = KVC_PACKED_ROWS(args->n);
    const int64_t fitting = (int64_t)(CHUNK_BYTES / row_bytes) / most * most, chunk = fitting > most ? fitting : most;
    (void)scratch;
    for (int64_t start = args->tiled; start < args->n; start += chunk) {
        const int64_t stop = start + chunk < args->n ? start + chunk : args->n;
        for (int64_t p = panel; p < panel_stop; p += 2) {
            for (int64_t first = start; first < stop;) {
                const int rows = kvc_packed_block_rows(most, args->digits, stop - first);
                const int64_t step = KVC_PACKED_PANELS(rows);
                for (int64_t q = p; q < panel_stop && q < p + 2; q += step) {
                    tile t;
                    begin(&t, args, first, rows, q, step, panel_stop, first == start, NULL, NULL);
                    tiles[rows](args->matrix, args->prepared + (size_t)first * row_bytes, &t);
                    give(args, &t);
                }
                first += rows;
            }
        }
    }
}
