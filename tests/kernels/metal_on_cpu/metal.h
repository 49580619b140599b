// The part of Metal's standard library that SPIRV-Cross's source of our kernels uses, as C++17.
#pragma once

#include "threads.h"

#include <cmath>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define kernel static
#define constant const
#define device
#define threadgroup_barrier(flags) on_cpu::suspend(on_cpu::Wait::barrier, __LINE__)

namespace metal {

using uint = uint32_t; using ushort = uint16_t; using uchar = uint8_t; using ulong = uint64_t;
using on_cpu::uint3;

struct half {
    uint16_t bits;
    half() = default;
#if defined(__F16C__)
    explicit half(float x) : bits(_cvtss_sh(x, 0)) {}
    operator float() const { return _cvtsh_ss(bits); }
#else
    explicit half(float x) { _Float16 y = _Float16(x); std::memcpy(&bits, &y, 2); }
    operator float() const { _Float16 y; std::memcpy(&y, &bits, 2); return float(y); }
#endif
};

template <class To, class From> To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type of another size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
#if !defined(__FAST_MATH__)
template <class To, class T> To as_type(on_cpu::device_ref<T> from) { return as_type<To, T>(T(from)); }
#endif
template <class To, class T> To as_type(on_cpu::shared_ref<T> from) { return as_type<To, T>(T(from)); }

#define FOR_INTEGERS(T) \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; } \
    inline T clamp(T x, T a, T b) { return min(max(x, a), b); }
FOR_INTEGERS(int) FOR_INTEGERS(uint) FOR_INTEGERS(int64_t) FOR_INTEGERS(uint64_t)
#undef FOR_INTEGERS
inline int abs(int x) { return x < 0 ? -x : x; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float log(float x) { return std::log(x); }
inline float exp(float x) { return std::exp(x); }
inline float tanh(float x) { return std::tanh(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float floor(float x) { return std::floor(x); }
inline float rint(float x) { return std::rint(x); }
inline float abs(float x) { return std::fabs(x); }
inline bool isnan(float x) { return x != x; }
namespace fast {
inline float min(float a, float b) { return b < a ? b : a; }
inline float max(float a, float b) { return a < b ? b : a; }
inline float clamp(float x, float a, float b) { return min(max(x, a), b); }
}
using fast::clamp; using fast::max; using fast::min;

#define FOLDED(NAME, EXPRESSION) \
    template <class T> T NAME(int line, T value) { \
        return on_cpu::over_simd<T>(line, value, +[](on_cpu::Value** lanes, int count) { \
            on_cpu::fold<T>(lanes, count, [](T a, T b) { return EXPRESSION; }); }); \
    }
FOLDED(simd_sum_at, T(a + b))
FOLDED(simd_max_at, a < b ? b : a)
FOLDED(simd_min_at, b < a ? b : a)
#undef FOLDED
template <class T> T simd_prefix_inclusive_sum_at(int line, T value) {
    return on_cpu::over_simd<T>(line, value, +[](on_cpu::Value** lanes, int count) {
        for (int n = 1; n < count; n++)
            on_cpu::held<T>(lanes[n]) = T(on_cpu::held<T>(lanes[n - 1]) + on_cpu::held<T>(lanes[n]));
    });
}
#define abs(x) metal::abs(x)  // not that of C, which is in every scope
#define simd_sum(x) simd_sum_at(__LINE__, x)
#define simd_max(x) simd_max_at(__LINE__, x)
#define simd_min(x) simd_min_at(__LINE__, x)
#define simd_prefix_inclusive_sum(x) simd_prefix_inclusive_sum_at(__LINE__, x)

}  // namespace metal
using metal::uint; using metal::ushort; using metal::uchar; using metal::ulong;
