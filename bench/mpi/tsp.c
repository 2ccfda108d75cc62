/* The shortest tour, by branch and bound: rank 0 has the counter from which all take beginnings of tours, between visits of its own;
 * whoever finds a better tour tells all others.
 */
#include "program.h"

#define TOWNS_MAX 16
/* Visits between two looks at what others have sent. */
#define VISITS 256

enum { ASK, GIVE, BETTER };

static uint64_t distance[TOWNS_MAX][TOWNS_MAX], best;
static long towns, beginnings, next, visits;
/* Ranks that know that there is no beginning left; what was sent to each rank, and came here, about better tours. */
static long dismissed, told, heard;

static void send(long what, int rank, int tag)
{
	count_messages(1, sizeof what);
	MPI_Send(&what, 1, MPI_LONG, rank, tag, MPI_COMM_WORLD);
}

/* Takes one message; the number that it gives, or -1 if it is about something else. */
static long take(const MPI_Status *status)
{
	long what;

	MPI_Recv(&what, 1, MPI_LONG, status->MPI_SOURCE, status->MPI_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	switch (status->MPI_TAG) {
	case GIVE:
		return what;
	case ASK:
		dismissed += next >= beginnings;
		send(next++, status->MPI_SOURCE, GIVE);
		break;
	case BETTER:
		heard++;
		if ((uint64_t)what < best)
			best = what;
	}
	return -1;
}

static void look(void)
{
	MPI_Status status;
	int has_come;

	for (;;) {
		MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &has_come, &status);
		if (!has_come)
			return;
		take(&status);
	}
}

/* The next message, whatever it is. */
static long wait(void)
{
	MPI_Status status;

	MPI_Probe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
	return take(&status);
}

static long beginning(void)
{
	long number = -1;

	if (!me) {
		look();
		return next++;
	}
	send(0, 0, ASK);
	while (number < 0)
		number = wait();
	return number;
}

/* All ways on from a town. */
static void visit(long here, unsigned visited, uint64_t length)
{
	if (++visits % VISITS == 0)
		look();
	if (visited == (1u << towns) - 1) {
		length += distance[here][0];
		if (length >= best)
			return;
		best = length;
		told++;
		for (int rank = 0; rank < ranks; rank++)
			if (rank != me)
				send(length, rank, BETTER);
		return;
	}
	for (long to = 0; to < towns; to++)
		if (!(visited & 1u << to) && length + distance[here][to] < best)
			visit(to, visited | 1u << to, length + distance[here][to]);
}

static void run(long size)
{
	long number, all;
	uint64_t shortest;
	double ms;

	towns = size < 4 ? 4 : size > TOWNS_MAX ? TOWNS_MAX : size;
	beginnings = (towns - 1) * (towns - 2);
	best = UINT32_MAX;
	for (long from = 0; from < TOWNS_MAX; from++)
		for (long to = 0; to < TOWNS_MAX; to++) {
			long low = from < to ? from : to, high = from < to ? to : from;

			distance[from][to] = 10 + (low * 7919 + high * 104729) % 91;
		}
	begin();
	while ((number = beginning()) < beginnings) {
		/* The second and the third town of the tour, which begins with town 0. */
		long second = 1 + number / (towns - 2), third = 1 + number % (towns - 2);

		third += third >= second;
		visit(third, 1u | 1u << second | 1u << third, distance[0][second] + distance[second][third]);
	}
	while (!me && dismissed < ranks - 1)
		wait();
	/* What is still on its way to this rank: all that the others told, but for what has come. */
	count_messages(me || ranks == 2 ? 1 : ranks - 1, sizeof all);
	MPI_Allreduce(&told, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
	while (heard < all - told)
		wait();
	ms = end_ms();
	shortest = best;
	tell("TSP", size, ms, shortest);
}
