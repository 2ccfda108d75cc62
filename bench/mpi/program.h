/* What the four programs have in common: time, messages, sums, and how they are run and tell.
 *
 * Each program computes what its namesake in crates/dsm/src/work/kernels does, from the same input, and prints a line of JSON for each
 * run. What it starts from is made before time and messages are counted; the sum of the result is made after.
 */
#ifndef PROGRAM_H
#define PROGRAM_H

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int me, ranks;

static void fail(const char *what)
{
	fprintf(stderr, "rank %d: %s\n", me, what);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Where the part of a rank begins, of so many things. */
__attribute__((unused)) static long part(long things, int rank)
{
	return things * rank / ranks;
}

__attribute__((unused)) static void *room(size_t bytes)
{
	void *memory = calloc(bytes ? bytes : 1, 1);

	if (!memory)
		fail("out of memory");
	return memory;
}

/* The order-dependent sum that mirrorball's programs make of a result. */
static uint64_t add(uint64_t sum, uint64_t word)
{
	sum ^= word;
	return sum << 1 | sum >> 63;
}

__attribute__((unused)) static uint64_t add_doubles(uint64_t sum, const double *values, long count)
{
	for (long at = 0; at < count; at++) {
		uint64_t word;

		memcpy(&word, &values[at], sizeof word);
		sum = add(sum, word);
	}
	return sum;
}

/* What this rank has sent. A collective operation counts as the fewest messages that can do it, whatever the library makes of it. */
static struct {
	unsigned long long messages, bytes;
} sent;

static void count_messages(long messages, long bytes_each)
{
	sent.messages += messages;
	sent.bytes += messages * bytes_each;
}

/* All wait for all: each rank but one tells that it has come, and is told that all have. */
static void barrier(void)
{
	count_messages(me ? 1 : ranks - 1, 0);
	MPI_Barrier(MPI_COMM_WORLD);
}

static double began;

/* All is made: time and messages are from here on. */
static void begin(void)
{
	MPI_Barrier(MPI_COMM_WORLD);
	memset(&sent, 0, sizeof sent);
	began = MPI_Wtime();
}

static double end_ms(void)
{
	barrier();
	return (MPI_Wtime() - began) * 1e3;
}

/* Rank 0 prints the run. `sum` is rank 0's. */
static void tell(const char *kernel, long size, double ms, uint64_t sum)
{
	unsigned long long mine[2] = { sent.messages, sent.bytes }, all[2];

	MPI_Reduce(mine, all, 2, MPI_UNSIGNED_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
	if (me)
		return;
	printf("{\"kernel\":\"%s\",\"size\":%ld,\"ranks\":%d,\"ms\":%.3f,\"sum\":\"%016llx\",\"messages\":%llu,\"bytes\":%llu}\n",
	       kernel, size, ranks, ms, (unsigned long long)sum, all[0], all[1]);
	fflush(stdout);
}

/* Whole rows of numbers from all ranks, on rank 0: those of `rows` of a square, which begin at this rank's part. */
__attribute__((unused)) static double *gather(const double *rows, long size)
{
	double *all = me ? NULL : room(size * size * sizeof *all);
	int *counts = room(ranks * sizeof *counts), *places = room(ranks * sizeof *places);

	for (int rank = 0; rank < ranks; rank++) {
		places[rank] = part(size, rank) * size;
		counts[rank] = part(size, rank + 1) * size - places[rank];
	}
	MPI_Gatherv(rows, counts[me], MPI_DOUBLE, all, counts, places, MPI_DOUBLE, 0, MPI_COMM_WORLD);
	free(counts);
	free(places);
	return all;
}

/* Each program's run of that size. */
static void run(long size);

int main(int argc, char **argv)
{
	long size;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &me);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	size = argc == 2 ? strtol(argv[1], NULL, 10) : 0;
	/* The largest square whose places are numbers for MPI. */
	if (size < ranks + 2 || size > 40000)
		fail("say one size: rows, thousands of keys, or towns");
	run(size);
	MPI_Finalize();
	return 0;
}

#endif
