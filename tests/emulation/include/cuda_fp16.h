// half: sign, 5 bits of exponent, 10 of fraction.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

struct __half {
  uint16_t bits;
};

inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 0x1f;
  const int fraction = x.bits & 0x3ff;
  float magnitude;
  if (exponent == 0x1f) {
    magnitude = fraction == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
  }
  return x.bits & 0x8000 ? -magnitude : magnitude;
}

// To the nearest, ties to even.
inline __half __float2half_rn(float x) {
  if (std::isnan(x)) return {0x7fff};
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::fabs(x);
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  // In units of the last place. A fraction that rounds up to 2048 carries into the exponent.
  const int exponent = std::max(magnitude > 0 ? std::ilogb(magnitude) : -14, -14);
  const int fraction = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return {static_cast<uint16_t>(sign | (((exponent + 14) << 10) + fraction))};
}

struct alignas(4) __half2 {
  __half x, y;
};

inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}

inline __half2 __hmul2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) * __half2float(b.x),
                           __half2float(a.y) * __half2float(b.y));
}
