/* Functions and their derivatives on many numbers at once, as in slopes.py; tables.py has the same codes. */

#ifndef CURVES_H
#define CURVES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum Code {
    LINEAR, DROPOUT, TWO_SLOPES, ADD, MUL, SKIP,
    SIGMOID, TANH, SILU, GELU, GELU_TANH, SOFTPLUS, ELU, MISH, ERF, HARDSWISH, HARDSIGMOID, CLAMP
};

#define ROOT_HALF 0.70710678118654752440
#define PER_ROOT_TWO_PI 0.39894228040143267794
#define EACH _Pragma("omp simd") for (int64_t k = 0; k < count; k++)

/* e^x to the last place or two, without a branch, so that loops over it become vector code. */
static inline double exponential(double x) {
    const double magic = 0x1.8p52; /* its sum with a small number has the nearest integer in its last bits */
    x = x < -708.0 ? -708.0 : x;
    x = x > 708.0 ? 708.0 : x;
    double shifted = x * 1.44269504088896340736 + magic, n = shifted - magic;
    double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    double power;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 52) + ((uint64_t)1023 << 52);
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline double logistic(double x) { return 1.0 / (1.0 + exponential(-x)); }

static inline double within(double x, double low, double high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

static void sigmoid_curve(int64_t count, const double *x, double *f, double *slope) {
    EACH {
        f[k] = logistic(x[k]);
        slope[k] = f[k] * (1.0 - f[k]);
    }
}

static void tanh_curve(int64_t count, const double *x, double *f, double *slope) {
    EACH {
        f[k] = 2.0 * logistic(2.0 * x[k]) - 1.0;
        slope[k] = 1.0 - f[k] * f[k];
    }
}

static void silu_curve(int64_t count, const double *x, double *f, double *slope) {
    EACH {
        double s = logistic(x[k]);
        f[k] = x[k] * s;
        slope[k] = s * (1.0 + x[k] * (1.0 - s));
    }
}

static void gelu_curve(int64_t count, const double *x, double *f, double *slope) {
    for (int64_t k = 0; k < count; k++) {
        double below = 0.5 * erfc(-ROOT_HALF * x[k]);
        f[k] = x[k] * below;
        slope[k] = below + x[k] * PER_ROOT_TWO_PI * exponential(-0.5 * x[k] * x[k]);
    }
}

static void gelu_tanh_curve(int64_t count, const double *x, double *f, double *slope) {
    const double c = 1.5957691216057307; /* 2 sqrt(2 / pi) */
    EACH {
        double s = logistic(c * (x[k] + 0.044715 * x[k] * x[k] * x[k]));
        f[k] = x[k] * s;
        slope[k] = s + x[k] * s * (1.0 - s) * c * (1.0 + 0.134145 * x[k] * x[k]);
    }
}

static void softplus_curve(int64_t count, const double *x, double *f, double *slope, double beta) {
    for (int64_t k = 0; k < count; k++) {
        double u = beta * x[k];
        f[k] = ((u > 0.0 ? u : 0.0) + log1p(exponential(-fabs(u)))) / beta;
        slope[k] = logistic(u);
    }
}

static void elu_curve(int64_t count, const double *x, double *f, double *slope, double alpha, double scale, double rate) {
    for (int64_t k = 0; k < count; k++) {
        double fall = x[k] > 0.0 ? 0.0 : expm1(rate * x[k]);
        f[k] = scale * (x[k] > 0.0 ? x[k] : alpha * fall);
        slope[k] = scale * (x[k] > 0.0 ? 1.0 : alpha * rate * (fall + 1.0));
    }
}

/* tanh(softplus x) = y / (y + 2) with y = w (w + 2), w = e^x: nothing cancels. */
static void mish_curve(int64_t count, const double *x, double *f, double *slope) {
    EACH {
        double w = exponential(x[k] > 40.0 ? 40.0 : x[k]), y = w * (w + 2.0), t = y / (y + 2.0);
        f[k] = x[k] * t;
        slope[k] = t + x[k] * logistic(x[k]) * 4.0 * (y + 1.0) / ((y + 2.0) * (y + 2.0));
    }
}

static void erf_curve(int64_t count, const double *x, double *f, double *slope) {
    for (int64_t k = 0; k < count; k++) {
        f[k] = erf(x[k]);
        slope[k] = 1.12837916709551257390 * exponential(-x[k] * x[k]);
    }
}

static void hardswish_curve(int64_t count, const double *x, double *f, double *slope) {
    EACH {
        double inside = x[k] / 3.0 + 0.5;
        f[k] = x[k] * within(x[k] + 3.0, 0.0, 6.0) / 6.0;
        slope[k] = x[k] <= -3.0 ? 0.0 : x[k] >= 3.0 ? 1.0 : inside;
    }
}

static void hardsigmoid_curve(int64_t count, const double *x, double *f, double *slope) {
    EACH {
        f[k] = within(x[k] + 3.0, 0.0, 6.0) / 6.0;
        slope[k] = fabs(x[k]) < 3.0 ? 1.0 / 6.0 : 0.0;
    }
}

static void clamp_curve(int64_t count, const double *x, double *f, double *slope, double low, double high) {
    EACH {
        double above = x[k] > low ? 1.0 : 0.0, below = x[k] < high ? 1.0 : 0.0;
        f[k] = within(x[k], low, high);
        slope[k] = above * below;
    }
}

static void evaluate(int64_t code, double a, double b, double c, int64_t count, const double *x, double *f, double *slope) {
    switch (code) {
    case SIGMOID: sigmoid_curve(count, x, f, slope); break;
    case TANH: tanh_curve(count, x, f, slope); break;
    case SILU: silu_curve(count, x, f, slope); break;
    case GELU: gelu_curve(count, x, f, slope); break;
    case GELU_TANH: gelu_tanh_curve(count, x, f, slope); break;
    case SOFTPLUS: softplus_curve(count, x, f, slope, a); break;
    case ELU: elu_curve(count, x, f, slope, a, b, c); break;
    case MISH: mish_curve(count, x, f, slope); break;
    case ERF: erf_curve(count, x, f, slope); break;
    case HARDSWISH: hardswish_curve(count, x, f, slope); break;
    case HARDSIGMOID: hardsigmoid_curve(count, x, f, slope); break;
    case CLAMP: clamp_curve(count, x, f, slope, a, b); break;
    }
}

#endif
