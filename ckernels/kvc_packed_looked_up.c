/* kvc_packed_looked_up.c - the tiles of packed formats with numbers that codes look up in a table. */
#include "kvc_packed_tiles.h"

LOOKED_UP_FORMATS(TILES)
