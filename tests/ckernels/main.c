/* main.c - the fuzzer without libFuzzer: runs mutants of a corpus, for a number of seconds or of cases.
 *
 *     fuzz [--seconds N] [--cases N] [--seed N] FILE...
 *
 * Runs the files unchanged, then mutants; mutant i of a seed is always the same. After a crash the input is written to
 * crash-<seed>-<i>, which can be passed as FILE.
 */
#include "draw.h"
#include "kvc.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#if !defined(O_BINARY)
#define O_BINARY 0 /* Windows changes the ends of lines without it */
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void print_comparisons(void); /* runs.h */

enum { MOST_BYTES = 4096, MOST_FILES = 1024 };

typedef struct input {
    size_t size;
    uint8_t data[MOST_BYTES];
} input;

static input current; /* for the handler */
static char crash_name[64];

static void on_crash(int number) {
    const int file = open(crash_name, O_WRONLY | O_CREAT | O_TRUNC | O_BINARY, 0644);
    if (write(file, current.data, current.size) == (ssize_t)current.size &&
        write(2, "the input is in ", 16) == 16 && write(2, crash_name, strlen(crash_name)) > 0 &&
        write(2, "\n", 1) == 1) {}
    signal(number, SIG_DFL);
    raise(number);
}

static int read_input(const char *path, input *to) {
    FILE *file = fopen(path, "rb");
    if (!file) return 0;
    to->size = fread(to->data, 1, MOST_BYTES, file);
    fclose(file);
    return 1;
}

/* Changes, inserts, removes or repeats some bytes, or copies them from another input; at most MOST_BYTES. */
static void mutate(input *x, const input *other, uint64_t *state) {
    for (int left = 1 + (int)(splitmix(state) % 6); left; left--) {
        const size_t at = x->size ? splitmix(state) % x->size : 0, rest = x->size - at;
        size_t n = 1 + splitmix(state) % 16;
        const uint8_t byte = (uint8_t)splitmix(state);
        switch (splitmix(state) % 6) {
        case 0: /* a bit */
            if (rest) x->data[at] ^= (uint8_t)(1 << byte % 8);
            break;
        case 1: /* a byte */
            if (rest) x->data[at] = byte;
            break;
        case 2: /* insert random bytes */
            if (x->size + n > MOST_BYTES) break;
            memmove(x->data + at + n, x->data + at, rest);
            for (size_t i = 0; i < n; i++) x->data[at + i] = (uint8_t)splitmix(state);
            x->size += n;
            break;
        case 3: /* remove bytes */
            if (n > rest) n = rest;
            memmove(x->data + at, x->data + at + n, rest - n);
            x->size -= n;
            break;
        case 4: /* the tail of another */
            x->size = at + (at < other->size ? other->size - at : 0);
            memcpy(x->data + at, other->data + at, x->size - at);
            break;
        default: /* cut the end off: the generator continues there */ x->size = at;
        }
    }
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
    static input corpus[MOST_FILES];
    double seconds = -1;
    long cases = -1, seed = 0, done = 0;
    int files = 0;
    for (int i = 1; i < argc; i++) {
        const int more = i + 1 < argc;
        if (more && !strcmp(argv[i], "--seconds"))
            seconds = atof(argv[++i]);
        else if (more && !strcmp(argv[i], "--cases"))
            cases = atol(argv[++i]);
        else if (more && !strcmp(argv[i], "--seed"))
            seed = atol(argv[++i]);
        else if (files == MOST_FILES || !read_input(argv[i], &corpus[files++]))
            return fprintf(stderr, "expected at most %d readable files, got %s\n", MOST_FILES, argv[i]), 2;
    }
    signal(SIGABRT, on_crash);
#if !defined(__SANITIZE_ADDRESS__) /* ASan has its own handlers and raises SIGABRT */
    signal(SIGSEGV, on_crash), signal(SIGFPE, on_crash), signal(SIGILL, on_crash);
#if defined(SIGBUS)
    signal(SIGBUS, on_crash);
#endif
#endif
    printf("levels:");
    for (int i = 0; i < kvc_num_levels(); i++) printf(" %s", kvc_level(i)->name);
    printf("\n");
    fflush(stdout);
    for (int i = 0; i < files; i++) {
        current = corpus[i];
        snprintf(crash_name, sizeof crash_name, "crash-file-%d", i);
        LLVMFuzzerTestOneInput(current.data, current.size);
    }
    const double start = seconds_now();
    for (; (seconds >= 0 || cases >= 0) && (seconds < 0 || seconds_now() - start < seconds) &&
           (cases < 0 || done < cases);
         done++) {
        uint64_t state = (uint64_t)seed << 32 ^ (uint64_t)done;
        splitmix(&state);
        current.size = 0;
        if (files) current = corpus[splitmix(&state) % (uint64_t)files];
        mutate(&current, files ? &corpus[splitmix(&state) % (uint64_t)files] : &current, &state);
        snprintf(crash_name, sizeof crash_name, "crash-%ld-%ld", seed, done);
        LLVMFuzzerTestOneInput(current.data, current.size);
    }
    print_comparisons();
    printf("%d files and %ld mutants of seed %ld, no failure\n", files, done, seed);
    return 0;
}
