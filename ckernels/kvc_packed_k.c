/* kvc_packed_k.c - the tiles of packed formats with scales and minima of their own in units of a larger block (K). */
#include "kvc_packed_tiles.h"

K_FORMATS(TILES)
