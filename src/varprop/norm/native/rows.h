/* Mean, variance and folded weights of all rows of a layer, and the way back (formulas: layout.Rows). Included once for
   every type of number, REAL; OF(name) is the name for that type. Sums are double.

   With T_j = sum_i W_ij m_i and S_j = sum_i W_ij² v_i for every tap j, the levers are A_p = sum_j T_j E_jp: the work for
   an entry does not depend on the number of columns of E, there and back. */

/* T_j and S_j (`sums`: all of the first, then all of the second) where the channels of a tap lie side by side. */
static void OF(sums_by_tap)(const Site *site, const REAL *row, const double *m, const double *v, double *sums) {
    for (int64_t j = 0; j < site->taps; j++, row += site->tap_stride) {
        double first = 0.0, second = 0.0;
#pragma omp simd reduction(+ : first, second)
        for (int64_t i = 0; i < site->channels; i++) {
            double x = row[i];
            first += x * m[i];
            second += x * x * v[i];
        }
        sums[j] = first;
        sums[site->taps + j] = second;
    }
}

/* The same for any strides; with `taps` and `step` known to the compiler the inner loop is unrolled. */
static inline void OF(sums_by_channel)(const Site *site, const REAL *row, const double *m, const double *v, double *sums,
                                       int64_t taps, int64_t step) {
    for (int64_t j = 0; j < 2 * taps; j++) sums[j] = 0.0;
    for (int64_t i = 0; i < site->channels; i++, row += site->channel_stride)
        for (int64_t j = 0; j < taps; j++) {
            double x = row[j * step];
            sums[j] += x * m[i];
            sums[taps + j] += x * x * v[i];
        }
}

static void OF(row_sums)(const Site *site, const REAL *row, const double *m, const double *v, double *sums) {
    if (site->channel_stride == 1) {
        OF(sums_by_tap)(site, row, m, v, sums);
    } else if (site->taps == 9 && site->tap_stride == 1) {
        double own[18];
        OF(sums_by_channel)(site, row, m, v, own, 9, 1);
        memcpy(sums, own, sizeof own);
    } else {
        OF(sums_by_channel)(site, row, m, v, sums, site->taps, site->tap_stride);
    }
}

static void OF(fold_row)(const Site *site, const REAL *row, double rate, REAL *folded) {
    if (site->dense) {
        for (int64_t k = 0; k < site->channels * site->taps; k++) folded[k] = (REAL)(rate * row[k]);
        return;
    }
    for (int64_t i = 0; i < site->channels; i++)
        for (int64_t j = 0; j < site->taps; j++) {
            int64_t place = i * site->channel_stride + j * site->tap_stride;
            folded[place] = (REAL)(rate * row[place]);
        }
}

/* Keeps the levers behind the first, which is the row's mean; returns the row's variance. */
static double OF(row_moments)(const Site *site, const double *sums, double *mean, double *levers) {
    double var = 0.0;
    *mean = 0.0;
    for (int64_t j = 0; j < site->taps; j++) {
        *mean += sums[j] * site->matrix[j * site->columns];
        var += sums[site->taps + j] * site->matrix[j * site->columns];
    }
    for (int64_t p = 1; p < site->columns; p++) {
        double lever = 0.0;
        for (int64_t j = 0; j < site->taps; j++) lever += sums[j] * site->matrix[j * site->columns + p];
        levers[p - 1] = lever;
        var += lever * lever;
    }
    return var;
}

static void OF(fold_site)(const Site *site, const REAL *weight, const REAL *shift, const REAL *scale, Kept kept,
                          REAL *folded, REAL *bias, double *sums) {
    int64_t per_group = site->outputs / site->groups;
    double *levers = kept.levers + site->levers;
    for (int64_t o = 0; o < site->outputs; o++, levers += site->columns - 1) {
        int64_t group = o / per_group, r = site->first_row + o;
        int64_t place = group * site->group_stride + o % per_group * site->row_stride;
        int64_t channel = site->first_channel + group * site->channels;
        OF(row_sums)(site, weight + place, kept.mean + channel, kept.var + channel, sums);
        kept.row_var[r] = OF(row_moments)(site, sums, kept.row_mean + r, levers);
        kept.rate[r] = scale[o] / sqrt(kept.row_var[r]);
        bias[o] = (REAL)(shift[o] - kept.row_mean[r] * kept.rate[r]);
        OF(fold_row)(site, weight + place, kept.rate[r], folded + place);
    }
}

static double OF(product)(const Site *site, const REAL *x, const REAL *y) {
    double sum = 0.0;
    if (site->dense) {
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < site->channels * site->taps; k++) sum += (double)x[k] * y[k];
        return sum;
    }
    for (int64_t i = 0; i < site->channels; i++)
        for (int64_t j = 0; j < site->taps; j++) {
            int64_t place = i * site->channel_stride + j * site->tap_stride;
            sum += (double)x[place] * y[place];
        }
    return sum;
}

/* What the way back knows of a row: its rate, and for every tap the derivative by T_j and by S_j. */
typedef struct {
    double rate;
    const double *by_first, *by_second;
} OF(Back);

/* Derivative by the weights of a row to `d`, and what it adds to those by the moments of the channels. */
static void OF(back_by_tap)(const Site *site, const REAL *w, const REAL *g, REAL *d, OF(Back) back, const double *m,
                            const double *v, double *by_mean, double *by_var) {
    for (int64_t j = 0; j < site->taps; j++, w += site->tap_stride, g += site->tap_stride, d += site->tap_stride) {
        double first = back.by_first[j], second = back.by_second[j], twice = 2.0 * second;
#pragma omp simd
        for (int64_t i = 0; i < site->channels; i++)
            d[i] = (REAL)(back.rate * g[i] + twice * v[i] * w[i] + first * m[i]);
        if (site->constant) continue;
#pragma omp simd
        for (int64_t i = 0; i < site->channels; i++) {
            double x = w[i];
            by_mean[i] += first * x;
            by_var[i] += second * x * x;
        }
    }
}

static inline void OF(back_by_channel)(const Site *site, const REAL *w, const REAL *g, REAL *d, OF(Back) back,
                                       const double *m, const double *v, double *by_mean, double *by_var, int64_t taps,
                                       int64_t step) {
    for (int64_t i = 0; i < site->channels; i++) {
        int64_t place = i * site->channel_stride;
        double mean = 0.0, var = 0.0, own_m = m[i], own_v = 2.0 * v[i];
#pragma omp simd reduction(+ : mean, var)
        for (int64_t j = 0; j < taps; j++) {
            double x = w[place + j * step], first = back.by_first[j], second = back.by_second[j];
            mean += first * x;
            var += second * x * x;
            d[place + j * step] = (REAL)(back.rate * g[place + j * step] + second * own_v * x + first * own_m);
        }
        by_mean[i] += mean;
        by_var[i] += var;
    }
}

static void OF(unfold_row)(const Site *site, const REAL *w, const REAL *g, REAL *d, OF(Back) back, const double *m,
                           const double *v, double *by_mean, double *by_var) {
    if (site->channel_stride == 1)
        OF(back_by_tap)(site, w, g, d, back, m, v, by_mean, by_var);
    else if (site->taps == 9 && site->tap_stride == 1)
        OF(back_by_channel)(site, w, g, d, back, m, v, by_mean, by_var, 9, 1);
    else
        OF(back_by_channel)(site, w, g, d, back, m, v, by_mean, by_var, site->taps, site->tap_stride);
}

static void OF(unfold_site)(const Site *site, const REAL *weight, const REAL *grad_weight, const REAL *grad_bias,
                            Kept kept, double *by_mean, double *by_var, double *by_scale, REAL *d_weight, double *sums) {
    int64_t per_group = site->outputs / site->groups;
    const double *levers = kept.levers + site->levers;
    for (int64_t o = 0; o < site->outputs; o++, levers += site->columns - 1) {
        int64_t group = o / per_group, r = site->first_row + o;
        int64_t place = group * site->group_stride + o % per_group * site->row_stride;
        int64_t channel = site->first_channel + group * site->channels;
        const REAL *w = weight + place, *g = grad_weight + place;
        double by_rate = OF(product)(site, w, g) - grad_bias[o] * kept.row_mean[r];
        double alpha = -grad_bias[o] * kept.rate[r], beta = -0.5 * by_rate * kept.rate[r] / kept.row_var[r];
        by_scale[r] = by_rate / sqrt(kept.row_var[r]);
        for (int64_t j = 0; j < site->taps; j++) {
            const double *e = site->matrix + j * site->columns;
            double by_first = alpha * e[0];
            for (int64_t p = 1; p < site->columns; p++) by_first += 2.0 * beta * levers[p - 1] * e[p];
            sums[j] = by_first;
            sums[site->taps + j] = beta * e[0];
        }
        OF(Back) back = {kept.rate[r], sums, sums + site->taps};
        OF(unfold_row)(site, w, g, d_weight + place, back, kept.mean + channel, kept.var + channel, by_mean + channel,
                       by_var + channel);
    }
}

/* Shifts and squared scales are the moments of the sources. */
static void OF(read_sources)(const Plan *plan, const void *const *parameters, double *mean, double *var) {
    for (int64_t s = 0; s < plan->site_count; s++) {
        const REAL *shift = parameters[plan->site_count + s], *scale = parameters[2 * plan->site_count + s];
        const Site *site = plan->sites + s;
        for (int64_t o = 0; o < site->outputs; o++) {
            mean[site->first_row + o] = shift[o];
            var[site->first_row + o] = (double)scale[o] * scale[o];
        }
    }
}

/* Derivatives by the shifts and scales of a site: through the lanes that start there, and by its own rows. */
static void OF(write_sources)(const Site *site, const REAL *scale, const REAL *grad_bias, const double *by_mean,
                              const double *by_var, const double *by_scale, REAL *d_shift, REAL *d_scale) {
    for (int64_t o = 0, r = site->first_row; o < site->outputs; o++, r++) {
        d_shift[o] = (REAL)(by_mean[r] + grad_bias[o]);
        d_scale[o] = (REAL)(2.0 * scale[o] * by_var[r] + by_scale[r]);
    }
}

/* Folded weights and biases of all layers. Parameters: pointers to all weights, then all shifts, then all scales.
   Results: to all folded weights, then all biases. Returns 0, or 1 if there is no memory. */
int OF(fold_forward)(const Plan *plan, const void *const *parameters, const double *given_mean, const double *given_var,
                     void *const *results, double *buffer) {
    Kept kept = kept_parts(plan, buffer);
    int64_t sites = plan->site_count;
    double *mean = malloc((2 * plan->total + 2 * plan->most_taps) * sizeof(double));
    if (mean) {
        double *var = mean + plan->total, *sums = var + plan->total;
        OF(read_sources)(plan, parameters, mean, var);
        moments_entering(plan, mean, var, given_mean, given_var, kept);
        for (int64_t s = 0; s < sites; s++)
            OF(fold_site)(plan->sites + s, parameters[s], parameters[sites + s], parameters[2 * sites + s], kept,
                          results[s], results[sites + s], sums);
    }
    free(mean);
    return !mean;
}

/* Derivatives by all parameters, in their order, and by the given moments. Gradients: pointers to those of all folded
   weights, then of all biases. */
int OF(fold_backward)(const Plan *plan, const void *const *parameters, double *buffer, const void *const *gradients,
                      void *const *results, double *d_given_mean, double *d_given_var) {
    Kept kept = kept_parts(plan, buffer);
    int64_t n = plan->entering_count, sites = plan->site_count;
    double *entering = calloc(2 * n + 2 * plan->total + plan->rows + 2 * plan->most_taps, sizeof(double));
    if (entering) {
        double *by_mean = entering + 2 * n, *by_var = by_mean + plan->total, *by_scale = by_var + plan->total;
        for (int64_t s = 0; s < sites; s++)
            OF(unfold_site)(plan->sites + s, parameters[s], gradients[s], gradients[sites + s], kept, entering, entering + n,
                            by_scale, results[s], by_scale + plan->rows);
        moments_leaving(plan, kept, entering, entering + n, by_mean, by_var, d_given_mean, d_given_var);
        for (int64_t s = 0; s < sites; s++)
            OF(write_sources)(plan->sites + s, parameters[2 * sites + s], gradients[sites + s], by_mean, by_var,
                              by_scale, results[sites + s], results[2 * sites + s]);
    }
    free(entering);
    return !entering;
}
