/* C = A x B: A and B are on rank 0. Each rank gets some rows of A and all of B, and keeps the same rows of C. */
#include "program.h"

static void run(long size)
{
	long rows = part(size, me + 1) - part(size, me);
	double *a = NULL, *mine = room(rows * size * sizeof *mine), *b = room(size * size * sizeof *b);
	double *c = room(rows * size * sizeof *c), ms;
	int *counts = room(ranks * sizeof *counts), *places = room(ranks * sizeof *places);

	for (int rank = 0; rank < ranks; rank++) {
		places[rank] = part(size, rank) * size;
		counts[rank] = part(size, rank + 1) * size - places[rank];
	}
	if (!me) {
		a = room(size * size * sizeof *a);
		for (long at = 0; at < size * size; at++) {
			a[at] = (double)(at % 17) / 3.0;
			b[at] = (double)(at % 23) / 7.0;
		}
	}
	begin();
	if (!me)
		for (int rank = 1; rank < ranks; rank++) {
			count_messages(1, size * size * sizeof *b);
			count_messages(1, counts[rank] * sizeof *a);
		}
	MPI_Bcast(b, size * size, MPI_DOUBLE, 0, MPI_COMM_WORLD);
	MPI_Scatterv(a, counts, places, MPI_DOUBLE, mine, rows * size, MPI_DOUBLE, 0, MPI_COMM_WORLD);
	for (long row = 0; row < rows; row++)
		for (long inner = 0; inner < size; inner++) {
			double factor = mine[row * size + inner];

			for (long column = 0; column < size; column++)
				c[row * size + column] += factor * b[inner * size + column];
		}
	ms = end_ms();

	double *all = gather(c, size);

	tell("matrix product", size, ms, me ? 0 : add_doubles(0, all, size * size));
	free(all);
	free(a);
	free(mine);
	free(b);
	free(c);
	free(counts);
	free(places);
}
