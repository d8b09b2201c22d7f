/* The thread pool of the kernel, a part of kernel.c.
 *
 * A task consists of chunks that any thread can compute: the caller and the pool's threads each take the next chunk
 * until none is left. The result of a chunk does not depend on the thread. The caller waits only for chunks that
 * were taken, so that a pool thread that starts late, or not at all, costs time only.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define SPINS 4000 /* before a thread sleeps or yields: longer than the time between two tasks of a forward */

typedef void (*gr_task)(const void *argument, int chunk, int thread);

static struct {
    pthread_mutex_t owner; /* held by the caller whose task it is */
    pthread_mutex_t lock;  /* of `wake` */
    pthread_cond_t wake;
    int started;           /* pool threads */
    atomic_int sleeping;   /* pool threads */
    atomic_uint turn;      /* odd while there is a task */
    /* Pool threads that may read the fields below, which change only while it is 0 and `turn` even. */
    atomic_int inside;
    gr_task task;
    const void *argument;
    int chunks, threads;
    atomic_int next; /* first chunk that is not taken */
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

INLINE void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_chunks(int thread) {
    for (int chunk; (chunk = atomic_fetch_add(&pool.next, 1)) < pool.chunks;) pool.task(pool.argument, chunk, thread);
}

/* Returns the turn of a task that comes after turn `seen`. */
static unsigned next_turn(unsigned seen) {
    unsigned turn;
    for (int spins = 0; spins < SPINS; spins++, relax())
        if ((turn = atomic_load(&pool.turn)) % 2 && turn != seen) return turn;
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (!((turn = atomic_load(&pool.turn)) % 2 && turn != seen)) pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
    return turn;
}

static void *serve(void *number) {
    int thread = (int)(intptr_t)number;
    for (unsigned turn = 0;;) {
        turn = next_turn(turn);
        atomic_fetch_add(&pool.inside, 1);
        /* If the turn has changed, the next task is possibly being written. */
        if (atomic_load(&pool.turn) == turn && thread < pool.threads) take_chunks(thread);
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

/* Starts the pool threads of a task for `threads` threads; returns how many there are, the caller included. */
static int start_threads(int threads) {
    for (; pool.started < threads - 1; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
    }
    return threads < pool.started + 1 ? threads : pool.started + 1;
}

/* Computes all chunks of a task on up to `threads` threads: on one during the task of another caller. */
static void run(gr_task task, const void *argument, int chunks, int threads) {
    if (threads < 2 || chunks < 2 || pthread_mutex_trylock(&pool.owner)) {
        for (int chunk = 0; chunk < chunks; chunk++) task(argument, chunk, 0);
        return;
    }
    pool.task = task, pool.argument = argument, pool.chunks = chunks;
    pool.threads = start_threads(threads);
    atomic_store(&pool.next, 0);
    atomic_fetch_add(&pool.turn, 1);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    take_chunks(0);
    atomic_fetch_add(&pool.turn, 1);
    for (int spins = 0; atomic_load(&pool.inside); spins++) spins < SPINS ? relax() : (void)sched_yield();
    pthread_mutex_unlock(&pool.owner);
}
