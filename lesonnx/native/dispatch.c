/* Chooses the instruction set once, from what the processor and the system report; LESONNX_ISA overrides. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#elif defined(_WIN32)
#include <windows.h>
#endif
#endif

typedef struct {
    const lesonnx_isa_table *table;
    int (*available)(void);
} candidate;

static int always(void) { return 1; }

#if defined(__x86_64__)
static uint64_t enabled_state(void) { /* XCR0: the registers that the system saves */
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

typedef struct {
    uint32_t leaf1_c, leaf7_b, leaf7_c, leaf7_1_a;
    uint64_t state;
} x86_features;

static x86_features features(void) {
    x86_features f = {0};
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        f.leaf1_c = c;
    }
    if (f.leaf1_c & (1u << 27)) { /* OSXSAVE */
        f.state = enabled_state();
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        f.leaf7_b = b;
        f.leaf7_c = c;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
            f.leaf7_1_a = a;
        }
    }
    return f;
}

static int has_avx2(void) {
    const x86_features f = features();
    return (f.state & 6) == 6 && (f.leaf1_c >> 12 & 1) && (f.leaf7_b >> 5 & 1); /* FMA, AVX2 */
}

static int has_avxvnni(void) { return has_avx2() && (features().leaf7_1_a >> 4 & 1); }

static int has_avx512vnni(void) {
    const x86_features f = features();
    const uint32_t needed = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    return has_avx2() && (f.state & 0xe6) == 0xe6 && (f.leaf7_b & needed) == needed && (f.leaf7_c >> 11 & 1);
}

static const candidate candidates[] = {{&lesonnx_avx512vnni, has_avx512vnni},
                                       {&lesonnx_avxvnni, has_avxvnni},
                                       {&lesonnx_avx2, has_avx2},
                                       {&lesonnx_portable, always}};
#elif defined(__aarch64__)
#if defined(__APPLE__)
static int sysctl_flag(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value;
}
static int has_dotprod(void) { return sysctl_flag("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has_dotprod() && sysctl_flag("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
static int has_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; }                  /* HWCAP_ASIMDDP */
static int has_i8mm(void) { return has_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1); } /* HWCAP2_I8MM */
#elif defined(_WIN32)
static int has_dotprod(void) { return IsProcessorFeaturePresent(43); } /* PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE */
static int has_i8mm(void) { return 0; }                                /* no flag for it before Windows 11 24H2 */
#else
static int has_dotprod(void) { return 0; }
static int has_i8mm(void) { return 0; }
#endif

static const candidate candidates[] = {
    {&lesonnx_i8mm, has_i8mm}, {&lesonnx_dotprod, has_dotprod}, {&lesonnx_neon, always}, {&lesonnx_portable, always}};
#else
static const candidate candidates[] = {{&lesonnx_portable, always}};
#endif

#define NUM_CANDIDATES (sizeof candidates / sizeof candidates[0])

/* A file that the compiler could not build (too old for its intrinsics) leaves a table without functions. */
static int usable(const candidate *c) { return c->table->multiply != NULL && c->available(); }

static const lesonnx_isa_table *find(const char *name) {
    for (size_t i = 0; i < NUM_CANDIDATES; i++) {
        if (usable(&candidates[i]) && (!name || !*name || strcmp(name, candidates[i].table->name) == 0)) {
            return candidates[i].table;
        }
    }
    return NULL;
}

static _Atomic(const lesonnx_isa_table *) chosen;

const lesonnx_isa_table *lesonnx_active(void) {
    const lesonnx_isa_table *table = atomic_load_explicit(&chosen, memory_order_acquire);
    if (!table) { /* threads that come here together find the same */
        table = find(getenv("LESONNX_ISA"));
        if (table) {
            atomic_store_explicit(&chosen, table, memory_order_release);
        }
    }
    return table;
}

const char *lesonnx_isa(void) {
    const lesonnx_isa_table *table = lesonnx_active();
    return table ? table->name : NULL;
}

const char *lesonnx_isas(void) {
    static char names[128];
    static atomic_int ready; /* 0 empty, 1 being written, 2 written */
    int expected = 0;
    if (atomic_compare_exchange_strong(&ready, &expected, 1)) {
        for (size_t i = 0; i < NUM_CANDIDATES; i++) {
            if (usable(&candidates[i])) {
                const size_t at = strlen(names);
                snprintf(names + at, sizeof names - at, "%s%s", at ? " " : "", candidates[i].table->name);
            }
        }
        atomic_store(&ready, 2);
    }
    while (atomic_load(&ready) != 2) {
    }
    return names;
}

int lesonnx_use_isa(const char *name) {
    const lesonnx_isa_table *table = find(name ? name : getenv("LESONNX_ISA"));
    if (!table) {
        return LESONNX_BAD_INPUT;
    }
    atomic_store_explicit(&chosen, table, memory_order_release);
    return LESONNX_OK;
}
