/* A stand-in for NVIDIA's driver, libcuda.so.1, which lets a machine without a GPU compile kernels for one.
 *
 * Taichi writes a kernel's PTX only when it runs on CUDA, and which kernels a model needs is decided by the calls that
 * it makes. So `tikv kernels build` makes those calls, over this library: it answers as one GPU of the compute
 * capability in TIKV_KERNELS_CAPABILITY (80 for 8.0), memory of the GPU is the host's, and launches do nothing. No
 * result has a meaning; only the PTX is kept.
 *
 * The functions are those that Taichi 1.7 looks up when it starts, and those that tikv calls through cuda-bindings,
 * which finds them by cuGetProcAddress_v2, and through ctypes. Taichi refuses to start if one is missing, so those for
 * other libraries' memory exist too, and fail. For a new version of Taichi: its list is in
 * taichi/rhi/cuda/cuda_driver_functions.inc.h. Quadrants 1.4 looks up some more, so that tests can run it over this.
 *
 *     cc -O1 -shared -fPIC -o libcuda.so.1 driver.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint64_t address;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_FOUND = 500, NOT_SUPPORTED = 801 };

/* Values of CUdevice_attribute; what is not here is 1. */
enum {
    MAX_THREADS_PER_BLOCK = 1, MAX_BLOCK_X = 2, MAX_BLOCK_Y = 3, MAX_BLOCK_Z = 4, MAX_GRID_X = 5, SHARED_PER_BLOCK = 8,
    WARP_SIZE = 10, REGISTERS_PER_BLOCK = 12, CLOCK_KHZ = 13, MULTIPROCESSORS = 16, THREADS_PER_MULTIPROCESSOR = 39,
    MAJOR = 75, MINOR = 76, SHARED_PER_MULTIPROCESSOR = 81, REGISTERS_PER_MULTIPROCESSOR = 82, SHARED_OPT_IN = 97
};

static const size_t MEMORY = (size_t)80 << 30; /* no pages are used before they are written */
static char handle;                            /* every context, module, function, stream and event */

static int capability(void) {
    const char *text = getenv("TIKV_KERNELS_CAPABILITY");
    return text ? atoi(text) : 80;
}

int cuInit(unsigned flags) { return SUCCESS; }

int cuDriverGetVersion(int *version) {
    *version = 12080;
    return SUCCESS;
}

int cuGetErrorName(int error, const char **text) {
    *text = "CUDA_ERROR";
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    *text = "a stand-in for NVIDIA's driver: see tikv/tools/kernels/driver.c";
    return SUCCESS;
}

/* The device */

int cuDeviceGetCount(int *count) {
    *count = 1;
    return SUCCESS;
}

int cuDeviceGet(int *device, int index) {
    *device = 0;
    return index ? INVALID_DEVICE : SUCCESS;
}

int cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, length, "a stand-in of compute capability %d.%d", capability() / 10, capability() % 10);
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = MEMORY;
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case MAX_THREADS_PER_BLOCK: case MAX_BLOCK_X: case MAX_BLOCK_Y: *value = 1024; break;
    case MAX_BLOCK_Z: *value = 64; break;
    case MAX_GRID_X: *value = 2147483647; break;
    case SHARED_PER_BLOCK: *value = 48 << 10; break;
    case WARP_SIZE: *value = 32; break;
    case REGISTERS_PER_BLOCK: case REGISTERS_PER_MULTIPROCESSOR: *value = 64 << 10; break;
    case CLOCK_KHZ: *value = 1500000; break;
    case MULTIPROCESSORS: *value = capability() >= 90 ? 132 : 108; break;
    case THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case MAJOR: *value = capability() / 10; break;
    case MINOR: *value = capability() % 10; break;
    case SHARED_PER_MULTIPROCESSOR: *value = (capability() >= 90 ? 228 : 164) << 10; break;
    case SHARED_OPT_IN: *value = (capability() >= 90 ? 227 : 163) << 10; break;
    default: *value = 1;
    }
    return SUCCESS;
}

/* Memory: the host's, at the same address */

static int allocate(address *pointer, size_t bytes) {
    void *memory = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return OUT_OF_MEMORY;
    *pointer = (uintptr_t)memory;
    return SUCCESS;
}

static int move(void *target, const void *source, size_t bytes) {
    memmove(target, source, bytes);
    return SUCCESS;
}

int cuMemAlloc_v2(address *pointer, size_t bytes) { return allocate(pointer, bytes); }
int cuMemAllocAsync(address *pointer, size_t bytes, void *stream) { return allocate(pointer, bytes); }
int cuMemAllocManaged(address *pointer, size_t bytes, unsigned flags) { return allocate(pointer, bytes); }

int cuMemAllocHost_v2(void **pointer, size_t bytes) {
    *pointer = malloc(bytes);
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

/* The sizes of allocations are not kept, so memory goes back when the process ends, which is soon. */
int cuMemFree_v2(address pointer) { return SUCCESS; }
int cuMemFreeAsync(address pointer, void *stream) { return SUCCESS; }

int cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    *pointer = malloc(bytes);
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemFreeHost(void *pointer) {
    free(pointer);
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t *unused, size_t *total) {
    *unused = *total = MEMORY;
    return SUCCESS;
}

int cuMemcpyHtoD_v2(address to, const void *from, size_t bytes) { return move((void *)to, from, bytes); }
int cuMemcpyDtoH_v2(void *to, address from, size_t bytes) { return move(to, (void *)from, bytes); }
int cuMemcpyDtoD_v2(address to, address from, size_t bytes) { return move((void *)to, (void *)from, bytes); }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    return move((void *)to, from, bytes);
}
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) { return move(to, (void *)from, bytes); }
int cuMemcpy2DAsync_v2(const void *copy, void *stream) { return SUCCESS; }

/* Memory that comes from mmap is zero, launches write nothing, and zeros over gigabytes would take pages and time. */
int cuMemsetD8_v2(address to, unsigned char value, size_t count) {
    if (value)
        memset((void *)to, value, count);
    return SUCCESS;
}

int cuMemsetD32_v2(address to, unsigned value, size_t count) {
    if (value)
        for (size_t i = 0; i < count; i++)
            ((unsigned *)to)[i] = value;
    return SUCCESS;
}

int cuMemsetD8Async(address to, unsigned char value, size_t count, void *stream) {
    return cuMemsetD8_v2(to, value, count);
}

int cuMemAdvise(address pointer, size_t bytes, int advice, int device) { return SUCCESS; }
int cuPointerGetAttribute(void *value, int attribute, address pointer) { return INVALID_VALUE; }

int cuDeviceGetDefaultMemPool(void **pool, int device) {
    *pool = &handle;
    return SUCCESS;
}

int cuMemPoolSetAttribute(void *pool, int attribute, void *value) { return SUCCESS; }
int cuMemPoolTrimTo(void *pool, size_t bytes) { return SUCCESS; }

/* Contexts, streams and events: there is one of each, and nothing to wait for */

static int give(void **result) {
    *result = &handle;
    return SUCCESS;
}

int cuCtxCreate_v2(void **context, unsigned flags, int device) { return give(context); }
int cuDevicePrimaryCtxRetain(void **context, int device) { return give(context); }
int cuCtxGetCurrent(void **context) { return give(context); }
int cuCtxSetCurrent(void *context) { return SUCCESS; }
int cuCtxSetLimit(int limit, size_t value) { return SUCCESS; }
int cuCtxSynchronize(void) { return SUCCESS; }
int cuStreamCreate(void **stream, unsigned flags) { return give(stream); }
int cuStreamDestroy_v2(void *stream) { return SUCCESS; }
int cuStreamSynchronize(void *stream) { return SUCCESS; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }

int cuStreamIsCapturing(void *stream, int *status) {
    *status = 0;
    return SUCCESS;
}

int cuEventCreate(void **event, unsigned flags) { return give(event); }
int cuEventDestroy(void *event) { return SUCCESS; }
int cuEventDestroy_v2(void *event) { return SUCCESS; }
int cuEventRecord(void *event, void *stream) { return SUCCESS; }
int cuEventSynchronize(void *event) { return SUCCESS; }

int cuEventElapsedTime(float *milliseconds, void *begin, void *end) {
    *milliseconds = 0;
    return SUCCESS;
}

/* Modules and launches: any text is taken, and nothing runs */

int cuModuleLoadData(void **module, const void *image) { return give(module); }
int cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
    return give(module);
}
int cuModuleGetFunction(void **function, void *module, const char *name) { return give(function); }

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = 1;
    return SUCCESS;
}

int cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *function, int block, size_t shared) {
    *count = 1;
    return SUCCESS;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra) {
    return SUCCESS;
}

int cuLaunchKernelEx(const void *configuration, void *function, void **arguments, void **extra) { return SUCCESS; }

/* Other libraries' memory, graphs and linked modules, which an engine looks up and does not use here */

#define UNUSED(name) \
    int name(void) { return NOT_SUPPORTED; }
UNUSED(cuExternalMemoryGetMappedBuffer)
UNUSED(cuExternalMemoryGetMappedMipmappedArray)
UNUSED(cuImportExternalMemory)
UNUSED(cuImportExternalSemaphore)
UNUSED(cuMipmappedArrayGetLevel)
UNUSED(cuSignalExternalSemaphoresAsync)
UNUSED(cuSurfObjectCreate)
UNUSED(cuWaitExternalSemaphoresAsync)
UNUSED(cuGraphAddEmptyNode)
UNUSED(cuGraphAddKernelNode)
UNUSED(cuGraphAddNode)
UNUSED(cuGraphConditionalHandleCreate)
UNUSED(cuGraphCreate)
UNUSED(cuGraphDestroy)
UNUSED(cuGraphExecDestroy)
UNUSED(cuGraphInstantiate)
UNUSED(cuGraphLaunch)
UNUSED(cuLinkAddData_v2)
UNUSED(cuLinkAddFile_v2)
UNUSED(cuLinkComplete)
UNUSED(cuLinkCreate_v2)
UNUSED(cuLinkDestroy)

/* How cuda-bindings finds all of these: by the name without its version */
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    void *library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = library ? dlsym(library, versioned) : NULL;
    if (!*function && library)
        *function = dlsym(library, name);
    if (status)
        *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
