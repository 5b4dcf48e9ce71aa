#include "checksum_variant.hpp"

KVTIER_CHECKSUM_VARIANT(portable)
