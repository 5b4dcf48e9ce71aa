#include "checksum_variant.hpp"

KVTIER_CHECKSUM_VARIANT(avx512)
