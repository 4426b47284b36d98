/* The two passes that fold a whole network, and their way back, for one thread: what passes.py does in torch. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "moments.h"
#include "plan.h"

#define EPS 1e-6

/* Mean and variance (with epsilon) of what enters every site. The sources are there already. */
static void moments_entering(const Plan *plan, double *mean, double *var, const double *given_mean,
                             const double *given_var, Kept kept) {
    int64_t lane = plan->sources;
    for (int64_t k = 0; k < plan->constants; k++, lane++)
        mean[lane] = plan->constant_mean[k], var[lane] = plan->constant_var[k];
    for (int64_t k = 0; k < plan->given; k++, lane++) mean[lane] = given_mean[k], var[lane] = given_var[k];
    run_steps(plan, mean, var, kept.slopes);
    for (int64_t k = 0; k < plan->entering_count; k++) {
        kept.mean[k] = mean[plan->entering[k]];
        kept.var[k] = var[plan->entering[k]] + EPS;
    }
}

/* Derivatives by all lanes (zero before) and by the given moments, from those by what enters. */
static void moments_leaving(const Plan *plan, Kept kept, const double *entering_mean, const double *entering_var,
                            double *by_mean, double *by_var, double *given_mean, double *given_var) {
    for (int64_t k = 0; k < plan->entering_count; k++) {
        by_mean[plan->entering[k]] += entering_mean[k];
        by_var[plan->entering[k]] += entering_var[k];
    }
    run_steps_back(plan, kept.slopes, by_mean, by_var);
    for (int64_t k = 0, lane = plan->sources + plan->constants; k < plan->given; k++, lane++)
        given_mean[k] = by_mean[lane], given_var[k] = by_var[lane];
}

#define REAL float
#define OF(name) name##_float
#include "rows.h"
#undef REAL
#undef OF

#define REAL double
#define OF(name) name##_double
#include "rows.h"
