/* Small float32 operations of a Qwen3 on a CPU, each in one pass where torch makes several.

   Compiled on the machine where it runs (library.py). Rows are shared among OpenMP's threads, whose number the caller
   gives. Vectors are GCC's and Clang's: 16 numbers, however many registers those take. Sizes are in elements. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
/* Numbers that a thread is worth waking for. */
#define WORK 8192

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
/* A vector anywhere in memory. */
typedef float loose __attribute__((vector_size(64), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec x) { *(loose *)p = x; }

/* The first n of 16 numbers, zeros behind them. */
INLINE vec load_some(const float *p, int64_t n) {
    if (n >= LANES) return load(p);
    vec x = {0};
    memcpy(&x, p, n * sizeof(float));
    return x;
}

INLINE void store_some(float *p, vec x, int64_t n) {
    if (n >= LANES) store(p, x);
    else memcpy(p, &x, n * sizeof(float));
}

INLINE float sum(vec x) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    union { vec all; eight half[2]; } of_16 = {x};
    union { eight all; four half[2]; } of_8 = {of_16.half[0] + of_16.half[1]};
    four of_4 = of_8.half[0] + of_8.half[1];
    return (of_4[0] + of_4[2]) + (of_4[1] + of_4[3]);
}

INLINE vec choose(ints where, vec a, vec b) { return (vec)((where & (ints)a) | (~where & (ints)b)); }

/* e^x within 1 unit in the last place or so: 0 from -87 down, infinite from 88.8 up. A NaN stays one. */
INLINE vec exponential(vec x) {
    x = choose(x > 89.0f, splat(89.0f), x);
    x = choose(x < -87.5f, splat(-87.5f), x);
    const vec round = splat(12582912.0f);
    vec n = (x * 1.44269504f + round) - round;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    /* 2^(n - 1), as 2^128 is no number; n is -126 at least, and then it is 0. */
    ints power = (__builtin_convertvector(n, ints) + 126) << 23;
    return p * (vec)power * 2.0f;
}

INLINE int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

INLINE int threads_for(int64_t numbers, int threads) {
    int64_t useful = numbers / WORK;
    return useful < 1 ? 1 : useful < threads ? (int)useful : threads;
}

/* ---- Transpose ---- */

/* x [length, dim] with a row stride -> columns first to last - 1 of out [dim, padded]; from `length` on they are zero. */
INLINE void transpose_columns(const float *x, int64_t stride, int64_t length, int64_t dim, int64_t padded,
                              int64_t first, int64_t last, float *out) {
    for (int64_t i = first; i < last; i += LANES) {
        int64_t rows = length - i;
        for (int64_t d = 0; d < dim; d++) {
            vec column = {0};
            if (rows >= LANES)
                for (int j = 0; j < LANES; j++) column[j] = x[(i + j) * stride + d];
            else
                for (int j = 0; j < rows; j++) column[j] = x[(i + j) * stride + d];
            store_some(out + d * padded + i, column, padded - i);
        }
    }
}

/* x [rows, columns] -> out [columns, rows], both contiguous. */
int transpose(const float *x, int64_t rows, int64_t columns, float *out, int threads) {
    int64_t blocks = (rows + LANES - 1) / LANES;
    threads = threads_for(rows * columns, threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        int64_t first = blocks * thread / threads * LANES, last = blocks * (thread + 1) / threads * LANES;
        transpose_columns(x, columns, rows, columns, rows, first, last < rows ? last : rows, out);
    }
    return 0;
}

/* ---- RMSNorm ---- */

/* x [outer, heads, width], with strides of the first two -> out and, unless it is NULL, normed, both contiguous, and
   inverse [outer * heads]. */
int rms_norm_forward(const float *x, int64_t outer, int64_t heads, int64_t outer_stride, int64_t head_stride,
                     int64_t width, const float *weight, float eps, float *out, float *normed, float *inverse,
                     int threads) {
#pragma omp parallel for num_threads(threads_for(outer * heads * width, threads)) schedule(static)
    for (int64_t position = 0; position < outer; position++)
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + position * outer_stride + head * head_stride;
            int64_t row = position * heads + head;
            vec squares = {0};
            for (int64_t i = 0; i < width; i += LANES) {
                vec u = load_some(from + i, width - i);
                squares += u * u;
            }
            float scale = 1.0f / sqrtf(sum(squares) / width + eps);
            if (inverse) inverse[row] = scale;
            for (int64_t i = 0; i < width; i += LANES) {
                int64_t n = width - i;
                vec y = load_some(from + i, n) * scale;
                if (normed) store_some(normed + row * width + i, y, n);
                store_some(out + row * width + i, y * load_some(weight + i, n), n);
            }
        }
    return 0;
}

/* All contiguous; grad_weight [width] is overwritten. 0, or 1 where there is no memory. */
int rms_norm_backward(const float *grad, const float *normed, const float *weight, const float *inverse, int64_t rows,
                      int64_t width, float *grad_x, float *grad_weight, int threads) {
    /* Sums of a block are in float32, sums of blocks in float64. */
    enum { BLOCK = 64 };
    int64_t blocks = (rows + BLOCK - 1) / BLOCK, padded = (width + LANES - 1) / LANES * LANES;
    threads = threads_for(rows * width, threads);
    double *sums = calloc(threads * width, sizeof(double));
    float *parts = calloc(threads * padded, sizeof(float));
    if (!sums || !parts) {
        free(sums);
        free(parts);
        return 1;
    }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        float *part = parts + thread * padded;
        double *own = sums + thread * width;
        for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; block++) {
            int64_t end = (block + 1) * BLOCK < rows ? (block + 1) * BLOCK : rows;
            memset(part, 0, padded * sizeof(float));
            for (int64_t row = block * BLOCK; row < end; row++) {
                const float *g = grad + row * width, *y = normed + row * width;
                vec along = {0};
                for (int64_t i = 0; i < width; i += LANES) {
                    int64_t n = width - i;
                    vec product = load_some(g + i, n) * load_some(y + i, n);
                    store(part + i, load(part + i) + product);
                    along += product * load_some(weight + i, n);
                }
                float projection = sum(along) / width, scale = inverse[row];
                for (int64_t i = 0; i < width; i += LANES) {
                    int64_t n = width - i;
                    vec of_normed = load_some(g + i, n) * load_some(weight + i, n);
                    store_some(grad_x + row * width + i, (of_normed - load_some(y + i, n) * projection) * scale, n);
                }
            }
            for (int64_t i = 0; i < width; i++) own[i] += part[i];
        }
    }
    for (int64_t i = 0; i < width; i++) {
        double total = 0;
        for (int thread = 0; thread < threads; thread++) total += sums[thread * width + i];
        grad_weight[i] = (float)total;
    }
    free(sums);
    free(parts);
    return 0;
}

/* ---- SwiGLU ---- */

/* x [rows, 2 width], gate and up side by side -> out [rows, width]. */
int swiglu_forward(const float *x, int64_t rows, int64_t width, float *out, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * width, threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = x + row * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t n = width - i;
            vec g = load_some(gate + i, n);
            store_some(out + row * width + i, g / (1.0f + exponential(-g)) * load_some(up + i, n), n);
        }
    }
    return 0;
}

/* grad [rows, width], x [rows, 2 width] -> grad_x as x. */
int swiglu_backward(const float *grad, const float *x, int64_t rows, int64_t width, float *grad_x, int threads) {
#pragma omp parallel for num_threads(threads_for(2 * rows * width, threads)) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = x + row * 2 * width, *up = gate + width;
        float *grad_gate = grad_x + row * 2 * width, *grad_up = grad_gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t n = width - i;
            vec g = load_some(gate + i, n), d = load_some(grad + row * width + i, n);
            vec share = 1.0f / (1.0f + exponential(-g));
            store_some(grad_up + i, d * g * share, n);
            store_some(grad_gate + i, d * load_some(up + i, n) * share * (1.0f + g * (1.0f - share)), n);
        }
    }
    return 0;
}

/* ---- Rotary positions ---- */

/* x [positions, heads, 2 half] with strides, cos and sin [positions, half], sign 1 or -1 -> out contiguous. */
int rotate(const float *x, int64_t positions, int64_t heads, int64_t half, int64_t position_stride,
           int64_t head_stride, const float *cosines, const float *sines, float sign, float *out, int threads) {
#pragma omp parallel for num_threads(threads_for(2 * positions * heads * half, threads)) schedule(static)
    for (int64_t position = 0; position < positions; position++)
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + position * position_stride + head * head_stride;
            float *to = out + (position * heads + head) * 2 * half;
            for (int64_t i = 0; i < half; i += LANES) {
                int64_t n = half - i;
                vec c = load_some(cosines + position * half + i, n), s = sign * load_some(sines + position * half + i, n);
                vec a = load_some(from + i, n), b = load_some(from + half + i, n);
                store_some(to + i, a * c - b * s, n);
                store_some(to + half + i, b * c + a * s, n);
            }
        }
    return 0;
}

/* ---- Attention ---- */

/* Elements of a matrix: `row` and `column` are what the next row and column are away. */
typedef struct {
    const float *at;
    int64_t row, column;
} operand;

/* rows x (LANES vectors) of C = A B, or C += A B: small constants, so that the sums stay in registers. */
INLINE void tile(const int rows, const int vectors, operand a, const float *b, int64_t b_row, float *c, int64_t c_row,
                 int64_t inner, const int add) {
    vec sums[4][2];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) sums[i][j] = add ? load(c + i * c_row + j * LANES) : (vec){0};
    for (int64_t k = 0; k < inner; k++) {
        vec of_b[2];
        for (int j = 0; j < vectors; j++) of_b[j] = load(b + k * b_row + j * LANES);
        for (int i = 0; i < rows; i++) {
            vec of_a = splat(a.at[i * a.row + k * a.column]);
            for (int j = 0; j < vectors; j++) sums[i][j] += of_a * of_b[j];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) store(c + i * c_row + j * LANES, sums[i][j]);
}

/* C [rows, columns] = A [rows, inner] B [inner, columns], or C += A B; columns is a multiple of LANES. */
INLINE void multiply(int64_t rows, int64_t columns, int64_t inner, operand a, const float *b, int64_t b_row, float *c,
                     int64_t c_row, const int add) {
    for (int64_t j = 0; j < columns; j += 2 * LANES) {
        int64_t i = 0;
        int pair = columns - j > LANES;
        for (; i < rows; ) {
            int height = rows - i >= 4 ? 4 : rows - i >= 2 ? 2 : 1;
            operand own = {a.at + i * a.row, a.row, a.column};
            float *to = c + i * c_row + j;
#define TILE(H, V) tile(H, V, own, b + j, b_row, to, c_row, inner, add)
            if (pair) { if (height == 4) TILE(4, 2); else if (height == 2) TILE(2, 2); else TILE(1, 2); }
            else { if (height == 4) TILE(4, 1); else if (height == 2) TILE(2, 1); else TILE(1, 1); }
#undef TILE
            i += height;
        }
    }
}

/* Queries of one head that are worked on together. */
#define BLOCK_ROWS 32

/* row[j] = e^(scale row[j] - shift) for j < seen, 0 up to `columns`; the sum. */
INLINE float exponentials(float *row, int64_t seen, int64_t columns, float scale, float shift) {
    vec total = {0};
    for (int64_t j = 0; j < columns; j += LANES) {
        vec x = exponential(load(row + j) * scale - shift);
        for (int64_t n = j + LANES > seen ? (seen > j ? seen - j : 0) : LANES; n < LANES; n++) x[n] = 0;
        store(row + j, x);
        total += x;
    }
    return sum(total);
}

INLINE float largest(const float *row, int64_t seen) {
    vec found = splat(row[0]);
    int64_t j = 0;
    for (; j + LANES <= seen; j += LANES) {
        vec x = load(row + j);
        found = choose(x > found, x, found);
    }
    float top = row[0];
    for (; j < seen; j++) top = row[j] > top ? row[j] : top;
    for (int i = 0; i < LANES; i++) top = found[i] > top ? found[i] : top;
    return top;
}

/* Causal attention of sequences `begins`, `lengths` [num] in q [T, groups * per_group, dim], k and v [T, groups, dim],
   all contiguous, dim a multiple of LANES -> out as q, and log-sum-exps [T, groups * per_group].
   0, or 1 where there is no memory. */
int attention_forward(const float *q, const float *k, const float *v, const int64_t *begins, const int64_t *lengths,
                      int64_t num, int64_t groups, int64_t per_group, int64_t dim, float scale, float *out,
                      float *logsums, int threads) {
    int64_t longest = 0, heads = groups * per_group;
    for (int64_t s = 0; s < num; s++) longest = lengths[s] > longest ? lengths[s] : longest;
    int64_t room = round_up(longest), size = (dim + BLOCK_ROWS) * room;
    float *memory = aligned_alloc(64, threads * size * sizeof(float) + 64);
    if (!memory) return 1;
    int64_t next = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        float *keys = memory + thread * size, *scores = keys + dim * room;
        for (;;) {
            int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (task >= num * groups) break;
            int64_t group = task % groups, length = lengths[task / groups], begin = begins[task / groups];
            int64_t padded = round_up(length), key_row = groups * dim, query_row = heads * dim;
            const float *values = v + begin * key_row + group * dim;
            transpose_columns(k + begin * key_row + group * dim, key_row, length, dim, padded, 0, padded, keys);
            for (int64_t head = group * per_group; head < (group + 1) * per_group; head++)
                for (int64_t first = 0; first < length; first += BLOCK_ROWS) {
                    int64_t end = first + BLOCK_ROWS < length ? first + BLOCK_ROWS : length;
                    int64_t at = (begin + first) * query_row + head * dim;
                    for (int64_t row = first; row < end; row += 4) {
                        int64_t rows = end - row < 4 ? end - row : 4, columns = round_up(row + rows);
                        float *own = scores + (row - first) * padded;
                        operand queries = {q + at + (row - first) * query_row, query_row, 1};
                        multiply(rows, columns, dim, queries, keys, padded, own, padded, 0);
                        for (int64_t i = 0; i < rows; i++) {
                            float *line = own + i * padded;
                            int64_t seen = row + i + 1;
                            float top = largest(line, seen) * scale;
                            float total = exponentials(line, seen, columns, scale, top), part = 1.0f / total;
                            for (int64_t j = 0; j < columns; j += LANES) store(line + j, load(line + j) * part);
                            logsums[(begin + row + i) * heads + head] = top + logf(total);
                        }
                        operand shares = {own, padded, 1};
                        multiply(rows, dim, row + rows, shares, values, key_row,
                                 out + at + (row - first) * query_row, query_row, 0);
                    }
                }
        }
    }
    free(memory);
    return 0;
}

/* The gradients of attention_forward, from its inputs and log-sum-exps. 0, or 1 where there is no memory. */
int attention_backward(const float *grad, const float *q, const float *k, const float *v, const float *logsums,
                       const int64_t *begins, const int64_t *lengths, int64_t num, int64_t groups, int64_t per_group,
                       int64_t dim, float scale, float *grad_q, float *grad_k, float *grad_v, int threads) {
    int64_t longest = 0, heads = groups * per_group;
    for (int64_t s = 0; s < num; s++) longest = lengths[s] > longest ? lengths[s] : longest;
    int64_t room = round_up(longest), size = (4 * dim + 2 * BLOCK_ROWS) * room;
    float *memory = aligned_alloc(64, threads * size * sizeof(float) + 64);
    if (!memory) return 1;
    int64_t next = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        float *keys = memory + thread * size, *values = keys + dim * room, *of_keys = values + dim * room;
        float *of_values = of_keys + dim * room, *shares = of_values + dim * room, *slopes = shares + BLOCK_ROWS * room;
        for (;;) {
            int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (task >= num * groups) break;
            int64_t group = task % groups, length = lengths[task / groups], begin = begins[task / groups];
            int64_t padded = round_up(length), key_row = groups * dim, query_row = heads * dim;
            int64_t own_keys = begin * key_row + group * dim;
            transpose_columns(k + own_keys, key_row, length, dim, padded, 0, padded, keys);
            transpose_columns(v + own_keys, key_row, length, dim, padded, 0, padded, values);
            memset(of_keys, 0, length * dim * sizeof(float));
            memset(of_values, 0, length * dim * sizeof(float));
            for (int64_t head = group * per_group; head < (group + 1) * per_group; head++)
                for (int64_t first = 0; first < length; first += BLOCK_ROWS) {
                    int64_t end = first + BLOCK_ROWS < length ? first + BLOCK_ROWS : length;
                    int64_t at = (begin + first) * query_row + head * dim, height = end - first;
                    int64_t wide = round_up(end);
                    for (int64_t row = first; row < end; row += 4) {
                        int64_t rows = end - row < 4 ? end - row : 4, columns = round_up(row + rows);
                        int64_t here = at + (row - first) * query_row;
                        float *share = shares + (row - first) * padded, *slope = slopes + (row - first) * padded;
                        operand queries = {q + here, query_row, 1}, upstream = {grad + here, query_row, 1};
                        multiply(rows, columns, dim, queries, keys, padded, share, padded, 0);
                        multiply(rows, columns, dim, upstream, values, padded, slope, padded, 0);
                        for (int64_t i = 0; i < rows; i++) {
                            float *p = share + i * padded, *s = slope + i * padded;
                            exponentials(p, row + i + 1, columns, scale, logsums[(begin + row + i) * heads + head]);
                            vec along = {0};
                            for (int64_t j = 0; j < columns; j += LANES) along += load(p + j) * load(s + j);
                            float mean = sum(along);
                            for (int64_t j = 0; j < columns; j += LANES)
                                store(s + j, load(p + j) * (load(s + j) - mean) * scale);
                            for (int64_t j = columns; j < wide; j += LANES) {
                                store(p + j, (vec){0});
                                store(s + j, (vec){0});
                            }
                        }
                        operand of_scores = {slope, padded, 1};
                        multiply(rows, dim, row + rows, of_scores, k + own_keys, key_row, grad_q + here, query_row, 0);
                    }
                    operand of_scores = {slopes, 1, padded}, of_out = {shares, 1, padded};
                    multiply(end, dim, height, of_scores, q + at, query_row, of_keys, dim, 1);
                    multiply(end, dim, height, of_out, grad + at, query_row, of_values, dim, 1);
                }
            for (int64_t i = 0; i < length; i++) {
                memcpy(grad_k + own_keys + i * key_row, of_keys + i * dim, dim * sizeof(float));
                memcpy(grad_v + own_keys + i * key_row, of_values + i * dim, dim * sizeof(float));
            }
        }
    }
    free(memory);
    return 0;
}

/* One more token of each row: its query, key and value, normed and turned, into the cache, and attention over it.

   qkv [rows, groups * (per_group + 1) * dim + groups * dim]: group by group its queries and its key, then all values;
   in a head the two numbers that are turned together are neighbours. norms [groups, per_group + 1, dim].
   turns [rows, dim / 2, 2]: cosine and sine, times dim^-1/4. keys [rows, groups, dim, room], values [rows, groups, room,
   dim], room and dim multiples of LANES; row r has columns begins[r] to end - 1, the last of them is the new one.
   -> out [rows, groups * per_group * dim]. 0, or 1 where there is no memory. */
int decode_attention(const float *qkv, const float *norms, const float *turns, const int64_t *begins, int64_t rows,
                     int64_t groups, int64_t per_group, int64_t dim, int64_t room, int64_t end, float eps, float *keys,
                     float *values, float *out, int threads) {
    int64_t heads = per_group + 1, wide = groups * heads * dim, size = heads * dim + per_group * room;
    threads = threads_for(rows * groups * (end / 2 + 1) * dim, threads);
    float *memory = aligned_alloc(64, round_up(threads * size) * sizeof(float));
    if (!memory) return 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        float *turned = memory + thread * size, *scores = turned + heads * dim;
        for (int64_t task = rows * groups * thread / threads; task < rows * groups * (thread + 1) / threads; task++) {
            int64_t row = task / groups, group = task % groups, begin = begins[row];
            const float *from = qkv + row * (wide + groups * dim), *turn = turns + row * dim;
            for (int64_t head = 0; head < heads; head++) {
                const float *x = from + (group * heads + head) * dim, *norm = norms + (group * heads + head) * dim;
                float *to = turned + head * dim;
                vec squares = {0};
                for (int64_t i = 0; i < dim; i += LANES) squares += load(x + i) * load(x + i);
                float scale = 1.0f / sqrtf(sum(squares) / dim + eps);
                for (int64_t i = 0; i < dim; i += 2) {
                    float a = x[i] * scale * norm[i], b = x[i + 1] * scale * norm[i + 1];
                    to[i] = a * turn[i] - b * turn[i + 1];
                    to[i + 1] = a * turn[i + 1] + b * turn[i];
                }
            }
            float *own_keys = keys + task * dim * room, *own_values = values + task * room * dim;
            for (int64_t i = 0; i < dim; i++) own_keys[i * room + end - 1] = turned[per_group * dim + i];
            memcpy(own_values + (end - 1) * dim, from + wide + group * dim, dim * sizeof(float));
            /* Whole vectors of columns: those before `begin` get no share, and their values are not read. */
            int64_t base = begin / LANES * LANES, skipped = begin - base, seen = end - base, columns = round_up(seen);
            operand queries = {turned, dim, 1}, shares = {scores + skipped, columns, 1};
            multiply(per_group, columns, dim, queries, own_keys + base, room, scores, columns, 0);
            for (int64_t i = 0; i < per_group; i++) {
                float *line = scores + i * columns;
                for (int64_t j = 0; j < skipped; j++) line[j] = -1e30f;
                float part = 1.0f / exponentials(line, seen, columns, 1.0f, largest(line, seen));
                for (int64_t j = 0; j < columns; j += LANES) store(line + j, load(line + j) * part);
            }
            multiply(per_group, dim, seen - skipped, shares, own_values + begin * dim, dim,
                     out + task * per_group * dim, dim, 0);
        }
    }
    free(memory);
    return 0;
}
