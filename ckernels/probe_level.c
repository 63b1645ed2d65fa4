/* probe_level.c - prints the level that this CPU runs best. A build for this machine alone runs it to choose its levels. */
#include "kvc_dispatch.c"

#include <stdio.h>

const kvc_kernels kvc_kernels_scalar = {.name = "scalar"};

int main(void) { return puts(kvc_best_level()) < 0; }
