// The threads and the memory of a Metal launch on a CPU, with a check of each access.
//
// A kernel with barriers or SIMD-group functions runs a threadgroup's threads as fibers: each runs to the next of those
// or to its end. What a GPU leaves undefined ends the launch with a message: an index outside a buffer, a read of
// threadgroup memory that nobody wrote, two threads at one place without a barrier between them, a barrier or
// SIMD-group function that only some of the threads reach.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <type_traits>
#include <ucontext.h>
#include <unordered_map>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

extern "C" struct metal_launch {  // Launch in library.py
    void** data;  // by [[buffer(n)]]
    uint64_t* bytes;
    uint32_t groups;
    uint32_t simd_width;
    uint64_t seed;  // of the order in which threads run; 0: ascending
    uint32_t flush;  // whether subnormal float32 are zero, as on Apple's GPUs
    char* message;
    uint64_t message_size;
};

namespace on_cpu {

constexpr size_t STACK = 256 << 10;
constexpr int MOST_LANES = 128;
constexpr uint32_t MANY = 0xffffffff;

enum class Wait : uint8_t { none, barrier, simd, done };
union Value { int32_t i; uint32_t u; int64_t l; uint64_t ul; float f; };
struct Fiber {
    jmp_buf at;
    ucontext_t context;
    Wait wait;
    bool started;
    int line;  // of the barrier or function it waits at
    Value value;
    void (*combine)(Fiber** lanes, int count);
};

inline metal_launch* launch;
inline jmp_buf failed;
inline uint64_t epoch = 1, group_epoch = 1;  // a new one after each barrier, and of each threadgroup
inline uint32_t thread = 0;  // of the grid

[[noreturn]] inline void fail(const char* what, const char* name, int64_t at, int64_t limit) {
    std::snprintf(launch->message, launch->message_size, "thread %u: %s: %s, %lld of %lld", thread, what, name,
                  static_cast<long long>(at), static_cast<long long>(limit));
    _longjmp(failed, 1);
}

// Device memory: inside the buffer, and threads of one launch share no byte that one of them writes. Under fast-math the
// second is not looked for: what would be noted at each access keeps the compiler from joining them, as Metal's may.

struct Seen { uint32_t writer, reader; };  // threads of this launch, counted from 1
inline std::unordered_map<const void*, std::vector<Seen>> seen_bytes;  // by the start of a buffer

inline void see(std::vector<Seen>& bytes, uint64_t at, size_t size, bool writes, const char* name) {
    const uint32_t me = thread + 1;
    for (uint64_t n = at * size, end = n + size; n < end; n++) {
        Seen& s = bytes[n];
        if ((s.writer && s.writer != me) || (writes && s.reader && s.reader != me))
            fail("race in device memory", name, int64_t(at), int64_t(bytes.size() / size));
        if (writes) s.writer = me;
        else s.reader = s.reader && s.reader != me ? MANY : me;
    }
}

template <class T> inline T* place_in(T* data, int64_t at, uint64_t count, const char* name) {
    if (at < 0 || uint64_t(at) >= count) fail("outside the buffer", name, at, int64_t(count));
    return data + at;
}

#if defined(__FAST_MATH__)
template <class T> struct device_array {
    T* data; uint64_t count; const char* name;
    device_array(int buffer, const char* name)
        : data(static_cast<T*>(launch->data[buffer])), count(launch->bytes[buffer] / sizeof(T)), name(name) {}
    template <class I> T& operator[](I at) const { return *place_in(data, int64_t(at), count, name); }
};
#else
template <class T> struct device_ref {
    T* place; std::vector<Seen>* bytes; uint64_t at; const char* name;
    operator T() const { see(*bytes, at, sizeof(T), false, name); return *place; }
    T operator=(T value) const { see(*bytes, at, sizeof(T), true, name); return *place = value; }
    T operator=(const device_ref& other) const { return *this = T(other); }
};

template <class T> struct device_array {
    T* data; uint64_t count; const char* name; std::vector<Seen>* bytes;
    device_array(int buffer, const char* name)
        : data(static_cast<T*>(launch->data[buffer])), count(launch->bytes[buffer] / sizeof(T)), name(name),
          bytes(&seen_bytes[data]) {
        if (bytes->size() < launch->bytes[buffer]) bytes->resize(launch->bytes[buffer]);
    }
    template <class I> device_ref<T> operator[](I at) const {
        return {place_in(data, int64_t(at), count, name), bytes, uint64_t(at), name};
    }
};
#endif

// Threadgroup memory: written before it is read, and a barrier between two threads of which one writes.

template <class T> struct shared_cell { T value; uint64_t written, read; uint32_t writer, reader; };

template <class T> struct shared_ref {
    shared_cell<T>* cell; const char* name; int64_t at, limit;
    operator T() const {
        if (cell->written < group_epoch) fail("threadgroup memory read before it is written", name, at, limit);
        if (cell->written == epoch && cell->writer != thread) fail("race in threadgroup memory", name, at, limit);
        cell->reader = cell->read == epoch && cell->reader != thread ? MANY : thread;
        cell->read = epoch;
        return cell->value;
    }
    T operator=(T value) const {
        if ((cell->written == epoch && cell->writer != thread) || (cell->read == epoch && cell->reader != thread))
            fail("race in threadgroup memory", name, at, limit);
        cell->written = epoch;
        cell->writer = thread;
        return cell->value = value;
    }
    T operator=(const shared_ref& other) const { return *this = T(other); }
};

template <class T, int N> struct shared_array {
    shared_cell<T> cells[N] = {}; const char* name;
    explicit shared_array(const char* name) : name(name) {}
    shared_ref<T> operator[](int64_t i) {
        if (i < 0 || i >= N) fail("outside threadgroup memory", name, i, N);
        return {cells + i, name, i, N};
    }
};

// Threads

struct uint3 { uint32_t x, y, z; uint3(uint32_t x, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {} };
struct Position { uint3 grid, in_group, group; uint32_t index, lane, simd; };

inline std::vector<Fiber> fibers;
inline char* stacks;
inline Fiber* current;
inline jmp_buf scheduler;
inline void (*body)(const Position&);
inline uint32_t group_now, group_size;

inline Position position(uint32_t group, uint32_t index) {
    return {uint3(group * group_size + index, 0, 0), uint3(index, 0, 0), uint3(group, 0, 0),
            index, index % launch->simd_width, index / launch->simd_width};
}

inline void enter() {
    body(position(group_now, uint32_t(current - fibers.data())));
    current->wait = Wait::done;
    _longjmp(scheduler, 1);
}

inline void suspend(Wait wait, int line) {
    current->wait = wait;
    current->line = line;
    if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

inline void resume(uint32_t index) {
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
inline bool combine_simd_groups() {
    bool combined = false;
    for (uint32_t start = 0; start < group_size; start += launch->simd_width) {
        Fiber* lanes[MOST_LANES];
        const uint32_t count = std::min(launch->simd_width, group_size - start);
        uint32_t waiting = 0, together = 0;
        for (uint32_t n = 0; n < count; n++) {
            lanes[n] = &fibers[start + n];
            waiting += lanes[n]->wait == Wait::simd;
            together += lanes[n]->wait == Wait::simd && lanes[n]->line == lanes[0]->line;
        }
        if (!waiting) continue;
        if (together != count) fail("a SIMD-group function that not all its threads reach", "threads", together, count);
        lanes[0]->combine(lanes, int(count));
        for (uint32_t n = 0; n < count; n++) lanes[n]->wait = Wait::none;
        combined = true;
    }
    return combined;
}

// Lets all go on that wait at the barrier; false if all have ended.
inline bool pass_barrier() {
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

inline void run_together(uint32_t group, Order& order) {
    group_now = group;
    group_epoch = ++epoch;
    for (Fiber& fiber : fibers) fiber.wait = Wait::none, fiber.started = false;
    do {
        for (uint32_t n : order.next())
            if (fibers[n].wait == Wait::none) resume(n);
    } while (combine_simd_groups() || pass_barrier());
}

inline void run_one_by_one(uint32_t group, Order& order) {
    group_now = group;
    group_epoch = ++epoch;
    for (uint32_t n : order.next()) {
        thread = group * group_size + n;
        body(position(group, n));
    }
}

// `together`: the kernel has barriers or SIMD-group functions.
inline int run(metal_launch* given, uint32_t threads, bool together, void (*function)(const Position&)) {
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
    seen_bytes.clear();
#if defined(__x86_64__)
    _mm_setcsr(before);
#endif
    return result;
}

// SIMD groups

template <class T> T& held(Fiber* fiber) { return *reinterpret_cast<T*>(&fiber->value); }

template <class T, class F> T over_simd(int line, T value, F combine) {
    held<T>(current) = value;
    current->combine = combine;
    suspend(Wait::simd, line);
    return held<T>(current);
}

template <class T, class F> void fold(Fiber** lanes, int count, F with) {  // a butterfly, as hardware does it
    int step = 1;
    while (step < count) step *= 2;
    for (step /= 2; step; step /= 2)
        for (int n = 0; n < step; n++)
            if (n + step < count) held<T>(lanes[n]) = with(held<T>(lanes[n]), held<T>(lanes[n + step]));
    for (int n = 1; n < count; n++) held<T>(lanes[n]) = held<T>(lanes[0]);
}

}  // namespace on_cpu
