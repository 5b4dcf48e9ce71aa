/* What the driver tells about an address. */
#include "process.h"

/* Under the lock. Writes the attribute, or zeros where it has no meaning; false when this double does not know it. */
static bool describe(void *data, int attribute, const struct range *range, const struct registration *host,
                     uint64_t address) {
    const bool chunk = range && range->kind == MAPPED;
    switch (attribute) {
    case 1: /* context */
        *(CUcontext *)data = range ? &contexts[range->device] : host ? &contexts[host->device] : NULL;
        return true;
    case 2: /* memory type: 1 host, 2 device */
        *(unsigned *)data = range ? 2 : host ? 1 : 0;
        return true;
    case 3: /* its address on the device, which is the same */
        *(uint64_t *)data = range || host ? address : 0;
        return true;
    case 4: /* its address on the host, which device memory has none of */
        *(void **)data = host ? (void *)(uintptr_t)address : NULL;
        return true;
    case 7: /* buffer id */
        *(uint64_t *)data = range ? range->buffer_id : 0;
        return true;
    case 8: /* managed */
        *(unsigned char *)data = 0;
        return true;
    case 9: /* ordinal */
        *(int *)data = range ? ordinal_of(range->device) : host ? ordinal_of(host->device) : -2;
        return true;
    case 10: /* can be exported by cuIpcGetMemHandle */
        *(unsigned char *)data = range && range->kind == ALLOCATED && !settings()->mig;
        return true;
    case 11: /* range */
    case 19: /* mapping */
        *(uint64_t *)data = range ? range->base : host ? host->base : 0;
        return true;
    case 12:
    case 18:
        *(size_t *)data = range ? range->bytes : host ? host->bytes : 0;
        return true;
    case 13: /* mapped */
        *(unsigned char *)data = range != NULL;
        return true;
    case 14: /* handle types it can be exported by */
        *(uint64_t *)data = chunk ? (uint64_t)chunk_handle_types(range->chunk) : 0;
        return true;
    case 16: /* access */
        *(int *)data = range ? range->access : host ? 3 : 0;
        return true;
    case 20: /* memory block id */
        *(uint64_t *)data = range ? range->allocation : 0;
        return true;
    default:
        return false;
    }
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    ENTER(cuPointerGetAttribute);
    if (!data)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer");
    pthread_mutex_lock(&process_lock);
    const struct range *range = range_of(address);
    const struct registration *host = registration_of(address);
    const bool known = (range || host) && describe(data, attribute, range, host, address);
    pthread_mutex_unlock(&process_lock);
    if (!known)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "attribute %d of %#llx", attribute, (unsigned long long)address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr address) {
    ENTER(cuPointerGetAttributes);
    if (!count || !attributes || !data)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "nothing asked");
    bool known = true;
    pthread_mutex_lock(&process_lock);
    for (unsigned index = 0; index < count; index++)
        known &= describe(data[index], attributes[index], range_of(address), registration_of(address), address);
    pthread_mutex_unlock(&process_lock);
    if (!known)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "an attribute that is not part of this double");
    return CUDA_SUCCESS;
}
