/* The driver's version, its functions by name, and the devices. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "process.h"

static pthread_once_t order_once = PTHREAD_ONCE_INIT;
static uint32_t order[DEVICES]; /* physical device of each ordinal */
static uint32_t order_count;
static _Atomic bool initialised;

enum { UUID_TEXT = 41 };

/* Version 2 names a MIG slice itself; version 1 the whole device. */
static CUuuid uuid_of(uint32_t device, bool slice) {
    CUuuid uuid = {{(char)0xfa, 0x4e, 0, 0, 0, 0, 0x40, 0, (char)0x80, 0, 0, 0, 0, 0, 0, (char)device}};
    if (slice)
        uuid.bytes[8] = (char)0x81;
    return uuid;
}

static void uuid_text(uint32_t device, char text[UUID_TEXT]) {
    const CUuuid uuid = uuid_of(device, false);
    int length = snprintf(text, UUID_TEXT, "GPU-");
    for (int index = 0; index < 16; index++)
        length += snprintf(text + length, (size_t)(UUID_TEXT - length), "%s%02x",
                           index == 4 || index == 6 || index == 8 || index == 10 ? "-" : "",
                           (unsigned char)uuid.bytes[index]);
}

/* An ordinal or the beginning of a UUID; DEVICES when there is no such device. */
static uint32_t device_named(const char *name) {
    char *end;
    const unsigned long number = strtoul(name, &end, 10);
    if (!*end && end != name)
        return number < settings()->devices ? (uint32_t)number : DEVICES;
    for (uint32_t device = 0; device < settings()->devices; device++) {
        char text[UUID_TEXT];
        uuid_text(device, text);
        if (!strncasecmp(name, text, strlen(name)))
            return device;
    }
    return DEVICES;
}

/* As the driver reads CUDA_VISIBLE_DEVICES: in its order, up to the first name that is wrong. */
static void find_order(void) {
    char names[256];
    snprintf(names, sizeof names, "%s", settings()->visible);
    if (!getenv("CUDA_VISIBLE_DEVICES") && !*names) {
        for (uint32_t device = 0; device < settings()->devices && device < DEVICES; device++)
            order[order_count++] = device;
        return;
    }
    char *rest = NULL;
    for (char *name = strtok_r(names, ",", &rest); name && order_count < DEVICES; name = strtok_r(NULL, ",", &rest)) {
        const uint32_t device = device_named(name);
        if (device == DEVICES)
            return;
        order[order_count++] = device;
    }
}

uint32_t visible_devices(void) {
    pthread_once(&order_once, find_order);
    return order_count;
}

uint32_t physical_device(int ordinal) {
    return order[ordinal];
}

int ordinal_of(uint32_t device) {
    for (uint32_t ordinal = 0; ordinal < visible_devices(); ordinal++)
        if (order[ordinal] == device)
            return (int)ordinal;
    return -1;
}

bool driver_is_initialised(void) {
    return initialised;
}

EXPORT CUresult cuInit(unsigned flags) {
    ENTER(cuInit);
    if (flags)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "flags %u", flags);
    if (!visible_devices())
        return CUDA_ERROR_NO_DEVICE;
    initialised = true;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    ENTER(cuDriverGetVersion);
    if (!version)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer");
    *version = settings()->version;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
    ENTER(cuGetProcAddress_v2);
    if (!symbol || !address || flags > 2 || version > settings()->version)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "version %d of a driver %d", version, settings()->version);
    const struct function_info *best = NULL;
    bool known = false;
    for (int index = 0; index < FUNCTIONS; index++) {
        const struct function_info *info = &functions[index];
        if (strcmp(symbol, info->name) || info->since > settings()->version)
            continue;
        known = true;
        if (info->since <= version && (!best || info->since > best->since))
            best = info;
    }
    *address = NULL;
    if (best)
        memcpy(address, &best->address, sizeof *address);
    if (status)
        *status = best ? 0 : known ? 2 : 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount);
    if (!count)
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer");
    *count = (int)visible_devices();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(cuDeviceGet);
    if (!device || ordinal < 0 || (uint32_t)ordinal >= visible_devices())
        REFUSE(CUDA_ERROR_INVALID_DEVICE, "ordinal %d of %u", ordinal, visible_devices());
    *device = ordinal;
    return CUDA_SUCCESS;
}

#define CHECK_DEVICE(answer, device) \
    if (!(answer)) \
        REFUSE(CUDA_ERROR_INVALID_VALUE, "no place for the answer"); \
    if ((device) < 0 || (uint32_t)(device) >= visible_devices()) \
    REFUSE(CUDA_ERROR_INVALID_DEVICE, "device %d of %u", device, visible_devices())

EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
    ENTER(cuDeviceGetName);
    CHECK_DEVICE(name, device);
    snprintf(name, (size_t)size, "Fake GPU %u (test double)", physical_device(device));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid);
    CHECK_DEVICE(uuid, device);
    *uuid = uuid_of(physical_device(device), false);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(cuDeviceGetUuid_v2);
    CHECK_DEVICE(uuid, device);
    *uuid = uuid_of(physical_device(device), settings()->mig);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER(cuDeviceGetAttribute);
    CHECK_DEVICE(value, device);
    switch (attribute) {
    case 16: /* multiprocessors */
        *value = 132;
        return CUDA_SUCCESS;
    case 20: /* compute mode */
        *value = settings()->compute_mode;
        return CUDA_SUCCESS;
    case 33: /* PCI bus */
        *value = (int)physical_device(device) + 1;
        return CUDA_SUCCESS;
    case 34: /* PCI device */
    case 50: /* PCI domain */
        *value = 0;
        return CUDA_SUCCESS;
    case 40: /* asynchronous copy engines */
        *value = 3;
        return CUDA_SUCCESS;
    case 75: /* compute capability, major and minor */
        *value = 9;
        return CUDA_SUCCESS;
    case 76:
        *value = 0;
        return CUDA_SUCCESS;
    case 92: /* stream memory operations, version 1: reads 0 on real drivers although they work */
    case 93:
    case 94:
        *value = 0;
        return CUDA_SUCCESS;
    case 134: /* the host's NUMA node */
        *value = 0;
        return CUDA_SUCCESS;
    case 122: /* 64-bit stream memory operations */
        *value = !settings()->memops_refused;
        return CUDA_SUCCESS;
    case 103: /* POSIX descriptors for virtual memory */
    case 125: /* IPC events */
        *value = !settings()->mig;
        return CUDA_SUCCESS;
    case 41:  /* unified addressing */
    case 78:  /* stream priorities */
    case 91:  /* registered host memory has one address */
    case 102: /* virtual memory management */
    case 123: /* NOR waits */
        *value = 1;
        return CUDA_SUCCESS;
    default:
        REFUSE(CUDA_ERROR_INVALID_VALUE, "attribute %d is not part of this double", attribute);
    }
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER(cuDeviceTotalMem_v2);
    CHECK_DEVICE(bytes, device);
    *bytes = settings()->hbm_bytes;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device) {
    ENTER(cuDeviceGetPCIBusId);
    CHECK_DEVICE(text, device);
    snprintf(text, (size_t)size, "0000:%02X:00.0", physical_device(device) + 1);
    return CUDA_SUCCESS;
}
