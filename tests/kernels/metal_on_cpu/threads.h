// The threads and the memory of a Metal launch on a CPU, with a check of each access.
//
// A kernel with barriers or SIMD-group functions runs a threadgroup's threads as fibers: each runs to the next of those
// or to its end. What a GPU leaves undefined ends the launch with a message: an index outside a buffer, a read of
// threadgroup memory that nobody wrote, two threads at one place without a barrier between them, a barrier or
// SIMD-group function that only some of the threads reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

constexpr uint32_t MANY = 0xffffffff;  // of threads

extern metal_launch* launch;
extern uint64_t epoch, group_epoch;  // a new one after each barrier, and of each threadgroup
extern uint32_t thread;  // of the grid

[[noreturn]] void fail(const char* what, const char* name, int64_t at, int64_t limit);

// Device memory: inside the buffer, and threads of one launch share no byte that one of them writes. Under fast-math the
// second is not looked for: what would be noted at each access keeps the compiler from joining them, as Metal's may.

struct Bytes;  // who has read and written each byte of a buffer
Bytes* bytes_of(const void* start, uint64_t size);
void see(Bytes& bytes, uint64_t at, size_t size, bool writes, const char* name);

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
    T* place; Bytes* bytes; uint64_t at; const char* name;
    operator T() const { see(*bytes, at, sizeof(T), false, name); return *place; }
    T operator=(T value) const { see(*bytes, at, sizeof(T), true, name); return *place = value; }
    T operator=(const device_ref& other) const { return *this = T(other); }
    T operator|=(T value) const { return *this = T(T(*this) | value); }
};

template <class T> struct device_array {
    T* data; uint64_t count; const char* name; Bytes* bytes;
    device_array(int buffer, const char* name)
        : data(static_cast<T*>(launch->data[buffer])), count(launch->bytes[buffer] / sizeof(T)), name(name),
          bytes(bytes_of(data, launch->bytes[buffer])) {}
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
    void operator+=(T more) const { *this = T(T(*this) + more); }
    void operator++(int) const { *this += T(1); }
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

// Runs the function for each thread. `together`: it has barriers or SIMD-group functions.
int run(metal_launch* given, uint32_t threads, bool together, void (*function)(const Position&));

enum class Wait : uint8_t { barrier, simd, none, done };
void suspend(Wait wait, int line);  // until the others are at the same line

// SIMD-group functions: each thread leaves a value, the last one to come combines those of all.

union Value { int32_t i; uint32_t u; int64_t l; uint64_t ul; float f; };
void set_combine(Value value, void (*combine)(Value** lanes, int count));
Value combined();

template <class T> T& held(Value* value) { return *reinterpret_cast<T*>(value); }

template <class T, class F> T over_simd(int line, T value, F combine) {
    Value left{};
    held<T>(&left) = value;
    set_combine(left, combine);
    suspend(Wait::simd, line);
    left = combined();
    return held<T>(&left);
}

template <class T, class F> void fold(Value** lanes, int count, F with) {  // a butterfly, as hardware does it
    int step = 1;
    while (step < count) step *= 2;
    for (step /= 2; step; step /= 2)
        for (int n = 0; n < step; n++)
            if (n + step < count) held<T>(lanes[n]) = with(held<T>(lanes[n]), held<T>(lanes[n + step]));
    for (int n = 1; n < count; n++) held<T>(lanes[n]) = held<T>(lanes[0]);
}

}  // namespace on_cpu
