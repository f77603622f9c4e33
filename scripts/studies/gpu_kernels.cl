// The kernels of gpu_kernels.py, which defines RATE and the values of `then`. All have groups of 16 x 16.

// What follows a sum of a product: a bias, a bias and ReLU, the gradient of ReLU, or the update of a weight.
static void store(__global float *c, __global const float *extra, int row, int column, int columns, float sum,
                  int then) {
    int index = row * columns + column;
    if (then == BIAS || then == BIAS_RELU) sum += extra[column];
    if (then == BIAS_RELU) sum = max(sum, 0.0f);
    if (then == RELU_GRADIENT && extra[index] <= 0.0f) sum = 0.0f;
    c[index] = then == UPDATE ? c[index] - RATE * sum : sum;
}

// c[row, column] = sum over k of a[row * a_row + k * a_k] * b[k * b_k + column * b_column]
__kernel void matmul_naive(__global const float *a, __global const float *b, __global const float *extra,
                           __global float *c, int rows, int columns, int depth, int a_row, int a_k, int b_k,
                           int b_column, int then) {
    int row = get_global_id(1), column = get_global_id(0);
    if (row >= rows || column >= columns) return;
    float sum = 0.0f;
    for (int k = 0; k < depth; k++) sum += a[row * a_row + k * a_k] * b[k * b_k + column * b_column];
    store(c, extra, row, column, columns, sum, then);
}

// The same, with each tile of 16 x 16 values read once by its group.
__kernel void matmul_tiled(__global const float *a, __global const float *b, __global const float *extra,
                           __global float *c, int rows, int columns, int depth, int a_row, int a_k, int b_k,
                           int b_column, int then) {
    int row = get_global_id(1), column = get_global_id(0), y = get_local_id(1), x = get_local_id(0);
    __local float tile_a[16][16], tile_b[16][16];
    float sum = 0.0f;
    for (int first = 0; first < depth; first += 16) {
        int is_a = row < rows && first + x < depth, is_b = column < columns && first + y < depth;
        tile_a[y][x] = is_a ? a[row * a_row + (first + x) * a_k] : 0.0f;
        tile_b[y][x] = is_b ? b[(first + y) * b_k + column * b_column] : 0.0f;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = 0; k < 16; k++) sum += tile_a[y][k] * tile_b[k][x];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (row < rows && column < columns) store(c, extra, row, column, columns, sum, then);
}

// One group for each row: the gradient of the mean loss with respect to the logits, and the losses of the rows.
__kernel void cross_entropy(__global const float *logits, __global const int *labels, __global float *losses,
                            __global float *gradient, int rows, int columns) {
    int row = get_group_id(1), lane = get_local_id(1) * 16 + get_local_id(0);
    __local float peaks[256], sums[256];
    logits += row * columns;
    float peak = logits[0], sum = 0.0f;
    for (int i = lane; i < columns; i += 256) peak = max(peak, logits[i]);
    peaks[lane] = peak;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int width = 128; width > 0; width /= 2) {
        if (lane < width) peaks[lane] = max(peaks[lane], peaks[lane + width]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int i = lane; i < columns; i += 256) sum += exp(logits[i] - peaks[0]);
    sums[lane] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int width = 128; width > 0; width /= 2) {
        if (lane < width) sums[lane] += sums[lane + width];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int i = lane; i < columns; i += 256) {
        float target = i == labels[row] ? 1.0f : 0.0f;
        gradient[row * columns + i] = (exp(logits[i] - peaks[0]) / sums[0] - target) / rows;
    }
    if (lane == 0) losses[row] = log(sums[0]) + peaks[0] - logits[labels[row]];
}

__kernel void update_bias(__global const float *gradient, __global float *bias, int rows, int columns) {
    int column = get_group_id(0) * 256 + get_local_id(1) * 16 + get_local_id(0);
    if (column >= columns) return;
    float sum = 0.0f;
    for (int row = 0; row < rows; row++) sum += gradient[row * columns + column];
    bias[column] -= RATE * sum;
}
