/* Mean and variance after a function, with their derivatives by mean and variance of its argument (slopes.py). */

#ifndef MOMENTS_H
#define MOMENTS_H

#include "curves.h"
#include "plan.h"

#define LEAST_STD 1e-12
#define TINY 1.4916681462400413e-154 /* root of the smallest normal number */
#define WINDOW 8.5
#define FAR 50.0
#define LEAST_RATIO 1e-3 /* of mean and std of a rectified variable, as in gaussian/skip.py */
#define MOST_RATIO 50.0

typedef struct {
    double mean, var, mean_mean, mean_var, var_mean, var_var; /* of the result, and of what by what */
} Result;

typedef struct {
    int64_t count;
    double nodes[LONGEST_RULE], weights[LONGEST_RULE];
} Rule;

/* Gauss-Legendre on panels between the knots, each halved; nodes in units of std from the mean, weights sum to one. */
static void panels(const Plan *plan, const Step *step, double mean, double std, Rule *rule) {
    int64_t n = plan->legendre_count, count = 0;
    double low = -WINDOW, total = 0.0;
    for (int64_t panel = 0; panel <= step->knot_count; panel++) {
        double high = panel < step->knot_count ? within((step->knots[panel] - mean) / std, -WINDOW, WINDOW) : WINDOW;
        if (!(high > low)) continue;
        double quarter = 0.25 * (high - low);
        for (int half = 0; half < 2; half++, count += n) {
            double centre = low + (half ? 3.0 : 1.0) * quarter;
            for (int64_t k = 0; k < n; k++) {
                double z = centre + quarter * plan->legendre_nodes[k];
                rule->nodes[count + k] = z;
                rule->weights[count + k] = quarter * plan->legendre_weights[k] * exponential(-0.5 * z * z);
            }
        }
        low = high;
    }
    for (int64_t k = 0; k < count; k++) total += rule->weights[k];
    for (int64_t k = 0; k < count; k++) rule->weights[k] /= total;
    rule->count = count;
}

/* The trapezoidal rule converges geometrically for an analytic function, the slower the wider the lane. */
static const Grid *grid_for(const Plan *plan, const Step *step, double std) {
    for (int k = 0; k < GRIDS; k++)
        if (plan->grids[k].count && std <= plan->grids[k].widest * step->narrow) return &plan->grids[k];
    return 0;
}

static Result integrated(const Plan *plan, const Step *step, double mean, double var) {
    double x[LONGEST_RULE], f[LONGEST_RULE], slope[LONGEST_RULE], std = sqrt(var);
    std = std < LEAST_STD ? LEAST_STD : std;
    Rule rule;
    const Grid *grid = grid_for(plan, step, std);
    if (!grid) panels(plan, step, mean, std, &rule);
    const double *z = grid ? grid->nodes : rule.nodes, *w = grid ? grid->weights : rule.weights;
    int64_t count = grid ? grid->count : rule.count;
    EACH x[k] = mean + std * z[k];
    evaluate(step->code, step->a, step->b, step->c, count, x, f, slope);
    double m = 0.0, v = 0.0, by_mean = 0.0, by_std = 0.0, rise_mean = 0.0, rise_std = 0.0;
#pragma omp simd reduction(+ : m)
    for (int64_t k = 0; k < count; k++) m += w[k] * f[k];
#pragma omp simd reduction(+ : v, by_mean, by_std, rise_mean, rise_std)
    for (int64_t k = 0; k < count; k++) {
        double off = f[k] - m, leaning = w[k] * slope[k], risen = leaning * off;
        v += w[k] * off * off;
        by_mean += leaning;
        by_std += leaning * z[k];
        rise_mean += risen;
        rise_std += risen * z[k];
    }
    return (Result){m, v, by_mean, 0.5 / std * by_std, 2.0 * rise_mean, rise_std / std};
}

/* H_n(x) = E[(Z - x)_+^n] / phi(x) for n = 0, 1, 2 (mathematics.md, section 2): none of the operations cancels. */
static void mills(double x, double *h0, double *h1, double *h2) {
    if (x < 4.0) {
        double m = 1.2533141373155002512 * exp(0.5 * x * x) * erfc(ROOT_HALF * x);
        *h0 = m, *h1 = 1.0 - x * m, *h2 = (1.0 + x * x) * m - x;
        return;
    }
    double y = 0.5 * (sqrt(x * x + 100.0) + x);
    for (int n = 24; n > 2; n--) y = x + n / y;
    double r = 2.0 / y, c = 1.0 / (x + r), h = 1.0 / (x + c);
    *h0 = h, *h1 = c * h, *h2 = r * c * h;
}

/* (2.6) with the derivatives (2.7) of mathematics.md. */
static Result two_slopes(double mean, double var, double s, double t) {
    double std = sqrt(var), least = fabs(mean) / FAR, h0, h1, h2;
    least = least < TINY ? TINY : least;
    double a = mean / (std < least ? least : std), p = PER_ROOT_TWO_PI * exp(-0.5 * a * a);
    mills(fabs(a), &h0, &h1, &h2);
    double tail = p * h0, lift = erf(ROOT_HALF * fabs(a)), g = std * p * h1, r = p * (h2 - p * h1 * h1);
    double up = a > 0.0 ? 1.0 - tail : tail, down = a > 0.0 ? tail : 1.0 - tail;
    double above = (mean > 0.0 ? mean : 0.0) + g, below = (mean < 0.0 ? -mean : 0.0) + g;
    double var_above = r + (a > 0.0 ? lift : 0.0), var_below = r + (a > 0.0 ? 0.0 : lift);
    double d = s - t, m = s * above - t * below, per_std = 0.5 / (std < LEAST_STD ? LEAST_STD : std);
    double v = var * (s * s * var_above + t * t * var_below) + 2.0 * s * t * above * below;
    double v_mean = 2.0 * d * (s * above * down + t * below * up);
    double v_std = 2.0 * std * (s * s * up + t * t * down) - 2.0 * d * m * p;
    return (Result){m, v < 0.0 ? 0.0 : v, s * up + t * down, per_std * d * p, v_mean, per_std * v_std};
}

static Result of_one(const Plan *plan, const Step *step, double mean, double var) {
    switch (step->code) {
    case LINEAR: return (Result){mean * step->a + step->c, var * step->b, step->a, 0.0, 0.0, step->b};
    case DROPOUT: {
        double p = step->a, kept = 1.0 - p;
        return (Result){mean, (var + p * mean * mean) / kept, 1.0, 0.0, 2.0 * p / kept * mean, 1.0 / kept};
    }
    case TWO_SLOPES: return two_slopes(mean, var, step->a, step->b);
    default: return integrated(plan, step, mean, var);
    }
}

/* A function behind the maximum of equal Gaussians, by the chain rule. */
static Result behind_maximum(const Plan *plan, const Step *step, double mean, double var) {
    if (step->e == 0.0 && step->d == 1.0) return of_one(plan, step, mean, var);
    double std = sqrt(var), lean = 0.5 * step->e / (std < LEAST_STD ? LEAST_STD : std);
    Result r = of_one(plan, step, mean + step->e * std, step->d * var);
    r.mean_var = r.mean_mean * lean + r.mean_var * step->d;
    r.var_var = r.var_mean * lean + r.var_var * step->d;
    return r;
}

static void put(double *slopes, Result r) {
    slopes[0] = r.mean_mean, slopes[1] = r.mean_var, slopes[2] = r.var_mean, slopes[3] = r.var_var;
}

/* max(0, x + y), x rectified, as skip.py computes it; pairs are numbers of the mean and of the variance. */
static void after_skip(const Step *step, double m1, double v1, double m2, double v2, double *moments, double *slopes) {
    double skew = step->a, fall = step->b, split = step->c, std = sqrt(v1), held = std < LEAST_STD ? LEAST_STD : std;
    double r = within(m1 / held, LEAST_RATIO, MOST_RATIO), free = r > LEAST_RATIO && r < MOST_RATIO, cube = r * r * r;
    double between = 1.0 / (1.0 + split * cube * r), between_r = -4.0 * split * cube * between * between;
    double root = sqrt(between), root_r = 0.5 * between_r / root;
    double d = 0.5 * skew * exp(-fall * r * r) / (r * between * root);
    double d_r = d * (6.0 * split * cube * between - 2.0 * fall * r - 1.0 / r);
    double hypotenuse = sqrt(1.0 + d * d), e = d + hypotenuse, e_r = d_r * e / hypotenuse;
    double share = 1.0 / (1.0 + e * e), share_r = -2.0 * e * e_r * share * share, rest = 1.0 - share;
    double down = root / e, up = root * e, down_r = (root_r - down * e_r) / e, up_r = root_r * e + root * e_r;
    double inside = v2 + (1.0 - between) * v1;
    Result low = two_slopes(m1 + m2 - down * std, inside, 1.0, 0.0);
    Result high = two_slopes(m1 + m2 + up * std, inside, 1.0, 0.0);
    double gap = high.mean - low.mean, wider = high.var - low.var, lean = 2.0 * share * rest * gap;
    moments[0] = low.mean + share * gap;
    moments[1] = low.var + share * wider + share * rest * gap * gap;
    double by_lower[2] = {rest * low.mean_mean, rest * low.var_mean - lean * low.mean_mean};
    double by_upper[2] = {share * high.mean_mean, share * high.var_mean + lean * high.mean_mean};
    double by_inside[2] = {rest * low.mean_var + share * high.mean_var,
                           rest * low.var_var + share * high.var_var + lean * (high.mean_var - low.mean_var)};
    double by_share[2] = {gap, wider + (rest - share) * gap * gap};
    for (int k = 0; k < 2; k++, slopes += 2) {
        double by_mean = by_lower[k] + by_upper[k];
        double by_r = (by_upper[k] * up_r - by_lower[k] * down_r - by_inside[k] * between_r * std) * std;
        by_r = (by_r + by_share[k] * share_r) * free / held;
        double by_std = by_upper[k] * up - by_lower[k] * down + by_inside[k] * 2.0 * (1.0 - between) * std - by_r * r;
        slopes[0] = by_mean + by_r, slopes[1] = 0.5 / held * by_std, slopes[4] = by_mean, slopes[5] = by_inside[k];
    }
}

static void add_or_multiply(const Step *step, double m1, double v1, double m2, double v2, double *moments,
                            double *slopes) {
    double alpha = step->a, square = alpha * alpha;
    int add = step->code == ADD;
    moments[0] = add ? m1 + alpha * m2 : m1 * m2;
    moments[1] = add ? v1 + square * v2 : v1 * (v2 + m2 * m2) + m1 * m1 * v2;
    put(slopes, add ? (Result){0, 0, 1.0, 0.0, 0.0, 1.0} : (Result){0, 0, m2, 0.0, 2.0 * m1 * v2, v2 + m2 * m2});
    put(slopes + 4,
        add ? (Result){0, 0, alpha, 0.0, 0.0, square} : (Result){0, 0, m1, 0.0, 2.0 * m2 * v1, v1 + m1 * m1});
}

static void pairs(const Step *step, double *mean, double *var, double *slopes) {
    for (int64_t k = 0; k < step->count; k++, slopes += 8) {
        int64_t x = step->first[k], y = step->second[k];
        double moments[2];
        (step->code == SKIP ? after_skip : add_or_multiply)(step, mean[x], var[x], mean[y], var[y], moments, slopes);
        mean[step->start + k] = moments[0];
        var[step->start + k] = moments[1];
    }
}

/* All computed lanes, in order, with their derivatives. */
static void run_steps(const Plan *plan, double *mean, double *var, double *slopes) {
    for (const Step *step = plan->steps; step < plan->steps + plan->step_count; step++) {
        double *own = slopes + step->slopes;
        if (step->second) {
            pairs(step, mean, var, own);
            continue;
        }
        for (int64_t k = 0; k < step->count; k++) {
            Result r = behind_maximum(plan, step, mean[step->first[k]], var[step->first[k]]);
            mean[step->start + k] = r.mean;
            var[step->start + k] = r.var;
            put(own + 4 * k, r);
        }
    }
}

static void add_back(const double *slopes, double by_mean, double by_var, double *to_mean, double *to_var) {
    *to_mean += by_mean * slopes[0] + by_var * slopes[2];
    *to_var += by_mean * slopes[1] + by_var * slopes[3];
}

/* Derivatives by every lane, from those by the lanes that enter. */
static void run_steps_back(const Plan *plan, const double *slopes, double *by_mean, double *by_var) {
    for (const Step *step = plan->steps + plan->step_count; step-- > plan->steps;) {
        int64_t arity = step->second ? 2 : 1;
        for (int64_t k = 0; k < step->count; k++) {
            const double *own = slopes + step->slopes + 4 * arity * k;
            double m = by_mean[step->start + k], v = by_var[step->start + k];
            add_back(own, m, v, by_mean + step->first[k], by_var + step->first[k]);
            if (step->second) add_back(own + 4, m, v, by_mean + step->second[k], by_var + step->second[k]);
        }
    }
}

#endif
