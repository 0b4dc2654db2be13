/* What the pretend libraries do alike: they read the state file again when it has changed, do to calls what its rules
 * say, and record them.
 *
 * A fake includes this before anything else, defines what is "each fake's own" below, and lets every call go through
 * `enter`. All names here are static: a fake is one file.
 */
#pragma once
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { WORD = 256, MAX_RULES = 128, POLL_MS = 20 };
enum { ANYWHERE = -1, NOWHERE = -2 }; /* a rule's WHERE *, and the place of a call that is about no device */

/* OWN is a kind that only one fake has, under a name of its own. */
enum rule_kind { FAULT, HANG, SLOW, CRASH, OWN };

typedef struct {
    enum rule_kind kind;
    char call[WORD];
    long where;
    uint64_t value;
} Rule;

typedef int64_t Code; /* what a call answers, in whatever type the vendor has for it; 0 is success */

typedef struct {
    bool hang, crash;
    uint64_t slow_ms;
    Code code;
} Verdict;

/* ---- each fake's own ---- */

typedef struct {
    const char *name, *variable; /* the library's in complaints; the environment's that names the state file */
    const char *own_rule;        /* the word for OWN, or NULL */
    bool hexadecimal;            /* numbers may begin with 0x */
    bool where_optional;         /* a rule without WHERE is one with * */
} Fake;
static const Fake fake;

static void start_over(void);                            /* what holds before the first line, or without a file */
static void parse_words(const char *first, char **rest); /* a line */
static void complete(void);                              /* after the last line */

typedef struct Found Found; /* a copy of what a call is about, which needs no lock */
typedef Code Finder(const void *wanted, Found *found);

/* Finds what a call is about and judges it by `verdict_on`; records it if that is to be done at the `first` look. */
static Verdict look(const char *call, Finder *find, const void *wanted, Found *found, bool first);

/* ---- the state that all have ---- */

/* Guards all that is static, here and in the fake. Never held while a call hangs or is slow. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Rule rules[MAX_RULES];
static unsigned rule_count, line_number;
static bool present; /* there is a state file */

/* ---- reading the state file ---- */

/* A state file that makes no sense is a mistake in the test, so the test shall not go on. */
static void demand(bool fine, const char *otherwise, const char *what) {
    if (fine)
        return;
    fprintf(stderr, "fake %s: state file, line %u: %s: %s\n", fake.name, line_number, otherwise, what);
    abort();
}

/* Cuts the next word off, in place. Double quotes keep blanks together and are dropped; # starts a comment. */
static char *next_word(char **rest) {
    char *from = *rest + strspn(*rest, " \t\r\n"), *word = from, *end = from;
    bool quoted = false;
    if (*from == '\0' || *from == '#')
        return NULL;
    for (; *from != '\0' && (quoted || !isspace((unsigned char)*from)); from++) {
        if (*from == '"')
            quoted = !quoted;
        else
            *end++ = *from;
    }
    *rest = from + (*from != '\0');
    *end = '\0';
    return word;
}

static char *need_word(char **rest) {
    char *word = next_word(rest);
    demand(word != NULL, "a word is missing", "at the end");
    return word;
}

/* Cuts key=value in two, in place. */
static char *value_of(char *pair) {
    char *value = strchr(pair, '=');
    demand(value != NULL, "not key=value", pair);
    *value = '\0';
    return value + 1;
}

static void keep(char *to, const char *from, size_t size) {
    demand(strlen(from) < size, "too long", from);
    strcpy(to, from);
}

/* Any 64 bits: a negative number comes back as its two's complement. */
static uint64_t number(const char *text) {
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, fake.hexadecimal && strncmp(text, "0x", 2) == 0 ? 16 : 10);
    demand(end != text && *end == '\0' && errno == 0, "not a number", text);
    return value;
}

/* `words` ends with NULL. */
static unsigned position(const char *word, const char *const words[]) {
    unsigned i = 0;
    while (words[i] != NULL && strcmp(words[i], word) != 0)
        i++;
    demand(words[i] != NULL, "unknown word", word);
    return i;
}

/* A rule's first word; its `call` is for the fake to fill in. */
static Rule *new_rule(const char *kind) {
    const char *const kinds[] = {"fault", "hang", "slow", "crash", fake.own_rule, NULL};
    demand(rule_count < MAX_RULES, "too many rules", kind);
    rules[rule_count].kind = (enum rule_kind)position(kind, kinds);
    return &rules[rule_count++];
}

/* What stands behind a rule's CALL: WHERE, and for a fault and a slow call a value. */
static void parse_where(Rule *rule, char **rest) {
    bool valued = rule->kind == FAULT || rule->kind == SLOW;
    const char *where = valued || !fake.where_optional ? need_word(rest) : next_word(rest);
    const char *value = valued ? next_word(rest) : NULL;
    if (valued && value == NULL && fake.where_optional) {
        value = where;
        where = NULL;
    }
    rule->where = where == NULL || strcmp(where, "*") == 0 ? ANYWHERE : (long)number(where);
    demand(!valued || value != NULL, "a word is missing", "at the end");
    rule->value = valued ? number(value) : 0;
}

static void parse_line(char *rest) {
    const char *word = next_word(&rest);
    if (word == NULL)
        return;
    parse_words(word, &rest);
    word = next_word(&rest);
    demand(word == NULL, "one word too many", word);
}

static void parse(FILE *file) {
    char *line = NULL;
    size_t size = 0;
    for (line_number = 1; getline(&line, &size, file) != -1; line_number++)
        parse_line(line);
    free(line);
    complete();
}

static bool same_file(const struct stat *one, const struct stat *other) {
    return one->st_ino == other->st_ino && one->st_size == other->st_size &&
           one->st_mtim.tv_sec == other->st_mtim.tv_sec && one->st_mtim.tv_nsec == other->st_mtim.tv_nsec;
}

static void refresh(void) {
    static struct stat seen;
    struct stat now;
    const char *path = getenv(fake.variable);
    if (path != NULL && present && stat(path, &now) == 0 && same_file(&seen, &now))
        return;
    FILE *file = path == NULL ? NULL : fopen(path, "re");
    present = file != NULL;
    rule_count = 0;
    start_over();
    if (file == NULL)
        return;
    fstat(fileno(file), &seen); /* of the file that is parsed here, which may be newer than what stat saw */
    parse(file);
    fclose(file);
}

/* ---- what every call goes through ---- */

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        const Code code_ = (call);                                                                                     \
        if (code_ != 0)                                                                                                \
            return code_;                                                                                              \
    } while (0)

/* The first rule of the kind that matches; with the lock held. */
static const Rule *rule_for(enum rule_kind kind, const char *call, long where) {
    for (unsigned i = 0; i < rule_count; i++) {
        const Rule *rule = &rules[i];
        bool here = rule->where == ANYWHERE || rule->where == where;
        if (rule->kind == kind && here && (strcmp(rule->call, "*") == 0 || strcmp(rule->call, call) == 0))
            return rule;
    }
    return NULL;
}

/* What is to happen to a call that is to answer `code`; with the lock held. */
static Verdict verdict_on(const char *call, long where, Code code) {
    const Rule *slow = rule_for(SLOW, call, where);
    return (Verdict){.hang = rule_for(HANG, call, where) != NULL,
                     .crash = rule_for(CRASH, call, where) != NULL,
                     .slow_ms = slow == NULL ? 0 : slow->value,
                     .code = code};
}

/* Appends a line to the file `path`, unless it is NULL: the call's symbol and what is to be said `about` it. */
static void record_call(const char *path, const char *call, const char *about) {
    char line[2 * WORD];
    if (path == NULL)
        return;
    int length = snprintf(line, sizeof line, "%s%s\n", call, about);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    bool written = file >= 0 && write(file, line, (size_t)length) == length; /* at once: lines do not mix */
    demand(written, "the record cannot be written", path);
    close(file);
}

static Verdict judge(const char *call, Finder *find, const void *wanted, Found *found, bool first) {
    pthread_mutex_lock(&lock);
    refresh();
    const Verdict verdict = look(call, find, wanted, found, first);
    pthread_mutex_unlock(&lock);
    return verdict;
}

/* usleep would end at the first signal. */
static void pause_ms(uint64_t ms) {
    struct timespec left = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left) == -1 && errno == EINTR)
        continue;
}

/* Does to the call what the state says, and finds what it is about. */
static Code enter(const char *call, Finder *find, const void *wanted, Found *found) {
    Verdict verdict = judge(call, find, wanted, found, true);
    if (verdict.slow_ms > 0) {
        pause_ms(verdict.slow_ms);
        verdict = judge(call, find, wanted, found, false);
    }
    while (verdict.hang) {
        pause_ms(POLL_MS);
        verdict = judge(call, find, wanted, found, false);
    }
    if (verdict.crash)
        raise(SIGSEGV);
    return verdict.code;
}

/* ---- leaving symbols out ---- */

/* EXPORTED(name) hides a symbol when WITHOUT_name is 1, as -DWITHOUT_name makes it: HIDE_1 below then puts "hidden"
 * where "default" would have been. Otherwise HIDE_WITHOUT_name means nothing and is thrown away as the first word. */
#define HIDE_1 0, "hidden",
#define PASTE(a, b) a##b
#define EXPANDED(a, b) PASTE(a, b)
#define SECOND_OF(first, second, ...) second
#define SECOND(...) SECOND_OF(__VA_ARGS__)
#define EXPORTED(name) __attribute__((visibility(SECOND(EXPANDED(HIDE_, WITHOUT_##name) 0, "default", 0))))
