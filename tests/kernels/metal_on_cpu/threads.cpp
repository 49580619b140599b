// What threads.h declares and no kernel needs to see: compiled once for all kernels.
#include "threads.h"

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <sys/mman.h>
#include <ucontext.h>
#include <unordered_map>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace on_cpu {

constexpr size_t STACK = 256 << 10;
constexpr int MOST_LANES = 128;

metal_launch* launch;
uint64_t epoch = 1, group_epoch = 1;
uint32_t thread = 0;
static jmp_buf failed;

void fail(const char* what, const char* name, int64_t at, int64_t limit) {
    std::snprintf(launch->message, launch->message_size, "thread %u: %s: %s, %lld of %lld", thread, what, name,
                  static_cast<long long>(at), static_cast<long long>(limit));
    _longjmp(failed, 1);
}

struct Seen { uint32_t writer, reader; };  // threads of this launch, counted from 1
struct Bytes { std::vector<Seen> seen; };
static std::unordered_map<const void*, Bytes> buffers;  // by the start of a buffer

void see(Bytes& bytes, uint64_t at, size_t size, bool writes, const char* name) {
    const uint32_t me = thread + 1;
    for (uint64_t n = at * size, end = n + size; n < end; n++) {
        Seen& s = bytes.seen[n];
        if ((s.writer && s.writer != me) || (writes && s.reader && s.reader != me))
            fail("race in device memory", name, int64_t(at), int64_t(bytes.seen.size() / size));
        if (writes) s.writer = me;
        else s.reader = s.reader && s.reader != me ? MANY : me;
    }
}

Bytes* bytes_of(const void* start, uint64_t size) {
    Bytes& found = buffers[start];
    if (found.seen.size() < size) found.seen.resize(size);
    return &found;
}

struct Fiber {
    jmp_buf at;
    ucontext_t context;
    Wait wait;
    bool started;
    int line;  // of the barrier or function it waits at
    Value value;
    void (*combine)(Value** lanes, int count);
};

static std::vector<Fiber> fibers;
static char* stacks;
static Fiber* current;
static jmp_buf scheduler;
static void (*body)(const Position&);
static uint32_t group_now, group_size;

static Position position(uint32_t group, uint32_t index) {
    return {uint3(group * group_size + index, 0, 0), uint3(index, 0, 0), uint3(group, 0, 0),
            index, index % launch->simd_width, index / launch->simd_width};
}

static void enter() {
    body(position(group_now, uint32_t(current - fibers.data())));
    current->wait = Wait::done;
    _longjmp(scheduler, 1);
}

void suspend(Wait wait, int line) {
    current->wait = wait;
    current->line = line;
    if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

void set_combine(Value value, void (*combine)(Value** lanes, int count)) {
    current->value = value;
    current->combine = combine;
}

Value combined() { return current->value; }

static void resume(uint32_t index) {
    Fiber& fiber = fibers[index];
    current = &fiber;
    thread = group_now * group_size + index;
    fiber.wait = Wait::none;
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.at, 1);
    fiber.started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + index * STACK;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    setcontext(&fiber.context);
}

struct Order {  // of threads or threadgroups, another one at each call
    std::vector<uint32_t> numbers;
    uint64_t state;
    Order(uint32_t count, uint64_t seed) : numbers(count), state(seed) {
        for (uint32_t n = 0; n < count; n++) numbers[n] = n;
    }
    const std::vector<uint32_t>& next() {
        for (size_t n = state ? numbers.size() : 0; n > 1; n--) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            std::swap(numbers[n - 1], numbers[state % n]);
        }
        return numbers;
    }
};

// Does what the SIMD groups that wait for each other want; false if none does.
static bool combine_simd_groups() {
    bool combined = false;
    for (uint32_t start = 0; start < group_size; start += launch->simd_width) {
        Value* lanes[MOST_LANES];
        const uint32_t count = std::min(launch->simd_width, group_size - start);
        uint32_t waiting = 0, together = 0;
        for (uint32_t n = 0; n < count; n++) {
            const Fiber& fiber = fibers[start + n];
            lanes[n] = &fibers[start + n].value;
            waiting += fiber.wait == Wait::simd;
            together += fiber.wait == Wait::simd && fiber.line == fibers[start].line;
        }
        if (!waiting) continue;
        if (together != count) fail("a SIMD-group function that not all its threads reach", "threads", together, count);
        fibers[start].combine(lanes, int(count));
        for (uint32_t n = 0; n < count; n++) fibers[start + n].wait = Wait::none;
        combined = true;
    }
    return combined;
}

// Lets all go on that wait at the barrier; false if all have ended.
static bool pass_barrier() {
    uint32_t done = 0, waiting = 0;
    for (Fiber& fiber : fibers) {
        done += fiber.wait == Wait::done;
        waiting += fiber.wait == Wait::barrier && fiber.line == fibers[0].line;
    }
    if (done == group_size) return false;
    if (waiting != group_size) fail("a barrier that not all threads reach", "threads", waiting, group_size);
    for (Fiber& fiber : fibers) fiber.wait = Wait::none;
    epoch++;
    return true;
}

static void run_together(uint32_t group, Order& order) {
    group_now = group;
    group_epoch = ++epoch;
    for (Fiber& fiber : fibers) fiber.wait = Wait::none, fiber.started = false;
    do {
        for (uint32_t n : order.next())
            if (fibers[n].wait == Wait::none) resume(n);
    } while (combine_simd_groups() || pass_barrier());
}

static void run_one_by_one(uint32_t group, Order& order) {
    group_now = group;
    group_epoch = ++epoch;
    for (uint32_t n : order.next()) {
        thread = group * group_size + n;
        body(position(group, n));
    }
}

// `together`: the kernel has barriers or SIMD-group functions.
int run(metal_launch* given, uint32_t threads, bool together, void (*function)(const Position&)) {
    body = function;
    group_size = threads;
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    if (given->flush) _mm_setcsr(before | 0x8040);  // results and operands
#endif
    volatile int result = 0;
    const size_t size = threads * STACK;
    if (together) {
        fibers.resize(threads);
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        stacks = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0));
    }
    Order groups(given->groups, given->seed), order(threads, given->seed);
    if (_setjmp(failed)) result = 1;
    else
        for (uint32_t group : groups.next()) together ? run_together(group, order) : run_one_by_one(group, order);
    if (together) munmap(stacks, size);
    buffers.clear();
#if defined(__x86_64__)
    _mm_setcsr(before);
#endif
    return result;
}

}  // namespace on_cpu
