/* Threads of the kernel, a part of kernel.c.
 *
 * A task is some chunks of work that any thread may compute: the caller and its helpers each take the next one
 * until none is left. What a chunk computes does not depend on who computes it. A helper that comes late, or not
 * at all, costs time only: the caller goes on alone.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define PATIENCE 4000 /* looks for a task before a helper sleeps: longer than what lies between a forward's tasks */

typedef void (*gr_task)(const void *argument, int chunk, int thread);

static struct {
    pthread_mutex_t owner; /* held by the caller that has the helpers */
    pthread_mutex_t lock;  /* of `wake` */
    pthread_cond_t wake;
    int started;           /* helpers */
    atomic_int sleeping;   /* helpers */
    atomic_uint turn;      /* odd while there is a task */
    atomic_int inside;     /* helpers that read the fields below: these change only while it is 0 and `turn` even */
    gr_task task;
    const void *argument;
    int chunks, threads;
    atomic_int next; /* chunk that nobody has taken */
} team = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_chunks(int thread) {
    for (int chunk; (chunk = atomic_fetch_add(&team.next, 1)) < team.chunks;) team.task(team.argument, chunk, thread);
}

/* Returns the turn of a task that comes after turn `seen`. */
static unsigned next_turn(unsigned seen) {
    unsigned turn;
    for (int looks = 0; looks < PATIENCE; looks++, relax())
        if ((turn = atomic_load(&team.turn)) % 2 && turn != seen) return turn;
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.sleeping, 1);
    while (!((turn = atomic_load(&team.turn)) % 2 && turn != seen)) pthread_cond_wait(&team.wake, &team.lock);
    atomic_fetch_sub(&team.sleeping, 1);
    pthread_mutex_unlock(&team.lock);
    return turn;
}

static void *help(void *number) {
    int thread = (int)(intptr_t)number;
    for (unsigned turn = 0;;) {
        turn = next_turn(turn);
        atomic_fetch_add(&team.inside, 1);
        /* If the turn is over by now, the owner may be writing the next task. */
        if (atomic_load(&team.turn) == turn && thread < team.threads) take_chunks(thread);
        atomic_fetch_sub(&team.inside, 1);
    }
    return NULL;
}

/* Starts helpers for a task of `threads` threads; returns how many threads there are, the caller included. */
static int assemble(int threads) {
    for (; team.started < threads - 1; team.started++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(team.started + 1))) break;
        pthread_detach(thread);
    }
    return threads < team.started + 1 ? threads : team.started + 1;
}

/* Computes all chunks of a task on up to `threads` threads: on one while another caller has the helpers. */
static void run(gr_task task, const void *argument, int chunks, int threads) {
    if (threads < 2 || chunks < 2 || pthread_mutex_trylock(&team.owner)) {
        for (int chunk = 0; chunk < chunks; chunk++) task(argument, chunk, 0);
        return;
    }
    team.task = task, team.argument = argument, team.chunks = chunks;
    team.threads = assemble(threads);
    atomic_store(&team.next, 0);
    atomic_fetch_add(&team.turn, 1);
    if (atomic_load(&team.sleeping)) {
        pthread_mutex_lock(&team.lock);
        pthread_cond_broadcast(&team.wake);
        pthread_mutex_unlock(&team.lock);
    }
    take_chunks(0);
    atomic_fetch_add(&team.turn, 1);
    for (int looks = 0; atomic_load(&team.inside); looks++) looks < PATIENCE ? relax() : (void)sched_yield();
    pthread_mutex_unlock(&team.owner);
}
