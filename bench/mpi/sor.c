/* Red-black successive over-relaxation: each rank has some rows of the grid and a copy of the row on either side, which neighbours send
 * after each half of the points.
 */
#include "program.h"

#define TURNS 20
#define FACTOR 1.25

static void run(long size)
{
	long first = part(size, me), end = part(size, me + 1), rows = end - first;
	long from = first ? first : 1, to = end < size ? end : size - 1;
	double *all = room((rows + 2) * size * sizeof *all), *mine = all + size, ms;
	int above = me ? me - 1 : MPI_PROC_NULL, below = me + 1 < ranks ? me + 1 : MPI_PROC_NULL;

	/* The rows of others hold what they begin with. */
	for (long row = first - 1; row <= end; row++)
		for (long column = 0; column < size; column++) {
			int edge = row <= 0 || column == 0 || row >= size - 1 || column == size - 1;

			mine[(row - first) * size + column] = edge ? (double)(row + 2 * column) : 0.0;
		}
	begin();
	for (long half = 0; half < 2 * TURNS; half++) {
		for (long row = from; row < to; row++) {
			double *here = mine + (row - first) * size;

			for (long column = 1 + (row + half) % 2; column < size - 1; column += 2) {
				double around = here[column - 1] + here[column + 1] + here[column - size] +
						here[column + size];
				double old = here[column];

				here[column] = old + FACTOR * (around / 4.0 - old);
			}
		}
		count_messages((me > 0) + (me + 1 < ranks), size * sizeof *mine);
		MPI_Sendrecv(mine, size, MPI_DOUBLE, above, 0, mine + rows * size, size, MPI_DOUBLE, below, 0,
			     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		MPI_Sendrecv(mine + (rows - 1) * size, size, MPI_DOUBLE, below, 1, all, size, MPI_DOUBLE, above, 1,
			     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	}
	ms = end_ms();

	double *grid = gather(mine, size);

	tell("SOR", size, ms, me ? 0 : add_doubles(0, grid, size * size));
	free(grid);
	free(all);
}
