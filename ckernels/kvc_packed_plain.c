/* kvc_packed_plain.c - the tiles of packed formats with a scale, and perhaps a minimum, of 32 channels. */
#include "kvc_packed_tiles.h"

PLAIN_FORMATS(TILES)
