/* What Python lays down once for a network; tables.py has the same structures. Numbers are int64 and double. */

#ifndef PLAN_H
#define PLAN_H

#include <stdint.h>

enum { KNOTS = 5, GRIDS = 3, LONGEST_RULE = 256 };

/* One function on `count` lanes: lane `start + k` is the function of lanes first[k] (and second[k]). Before the function
   comes the maximum of equal Gaussians: mean + e std, variance times d (e = 0, d = 1: none). */
typedef struct {
    int64_t code, count, start, slopes, knot_count;
    const int64_t *first, *second;
    double e, d, a, b, c, narrow;
    double knots[KNOTS];
} Step;

/* The weight of one layer; strides count elements. `levers`: where its spread is kept. `dense`: a row lies in one piece.
   `constant`: what enters is data, whose moments need no derivative. */
typedef struct {
    int64_t outputs, groups, channels, taps, columns, first_row, first_channel, levers, dense, constant;
    int64_t group_stride, row_stride, channel_stride, tap_stride;
    const double *matrix; /* E of layout.Rows: taps x columns */
} Site;

/* Equidistant nodes on [-8.5, 8.5] with normalized weights; it serves lanes up to `widest` times a step's `narrow`. */
typedef struct {
    int64_t count;
    double widest;
    const double *nodes, *weights;
} Grid;

typedef struct {
    int64_t sources, constants, given, total, entering_count, rows, step_count, site_count, slope_count, legendre_count;
    int64_t most_taps;
    const double *constant_mean, *constant_var, *legendre_nodes, *legendre_weights;
    const int64_t *entering;
    const Step *steps;
    const Site *sites;
    Grid grids[GRIDS];
} Plan;

/* Where everything lies in the buffer that the forward pass keeps for the backward pass. */
typedef struct {
    double *mean, *var, *slopes, *row_mean, *row_var, *rate, *levers;
} Kept;

static Kept kept_parts(const Plan *plan, double *buffer) {
    Kept kept;
    kept.mean = buffer;
    kept.var = kept.mean + plan->entering_count;
    kept.slopes = kept.var + plan->entering_count;
    kept.row_mean = kept.slopes + plan->slope_count;
    kept.row_var = kept.row_mean + plan->rows;
    kept.rate = kept.row_var + plan->rows;
    kept.levers = kept.rate + plan->rows;
    return kept;
}

#endif
