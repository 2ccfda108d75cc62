/* Integer sort as NAS IS does it: each rank counts its keys by itself, and all counts are added up for all. */
#include "program.h"

#define KEYS (1 << 14)
#define TURNS 10

/* The key of that number. */
static uint64_t key(uint64_t number)
{
	uint64_t mixed = (number + 1) * 0x9e3779b97f4a7c15u;

	return (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9u % KEYS;
}

static void run(long size)
{
	long first = part(size * 1000, me), count = part(size * 1000, me + 1) - first;
	uint64_t *keys = room(count * sizeof *keys), *counts = room(KEYS * sizeof *counts);
	uint64_t *new = room(KEYS * sizeof *new), *table = room(KEYS * sizeof *table), sum = 0;
	double ms;

	for (long at = 0; at < count; at++)
		keys[at] = key(first + at);
	begin();
	for (int turn = 0; turn < TURNS; turn++) {
		uint64_t before = 0;

		memset(counts, 0, KEYS * sizeof *counts);
		for (long at = 0; at < count; at++)
			counts[keys[at]]++;
		/* Between two ranks each sends its counts to the other; of more, all send them on to one that sends back the sums. */
		count_messages(me || ranks == 2 ? 1 : ranks - 1, KEYS * sizeof *counts);
		MPI_Allreduce(counts, new, KEYS, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
		for (long at = 0; at < KEYS; at++)
			table[at] += new[at];
		/* Every rank ranks its own keys by the whole table. */
		for (long at = 0; at < KEYS; at++) {
			counts[at] = before;
			before += table[at];
		}
	}
	ms = end_ms();
	for (long at = 0; at < KEYS; at++)
		sum = add(sum, table[at]);
	tell("integer sort", size, ms, sum);
	free(keys);
	free(counts);
	free(new);
	free(table);
}
