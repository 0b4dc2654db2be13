/* The pretend NVML's calls for what operators watch beside utilization, memory and temperature. Part of nvml.c. */

NUMBER_CALL(nvmlDeviceGetPowerUsage, CARDS, POWER)
NUMBER_CALL(nvmlDeviceGetEnforcedPowerLimit, CARDS, LIMIT)
NUMBER_CALL(nvmlDeviceGetPowerManagementDefaultLimit, CARDS, DEFAULT_LIMIT)
NUMBER_CALL(nvmlDeviceGetNumFans, CARDS, FANS)

CALL(nvmlDeviceGetPowerManagementLimitConstraints, nvmlDevice_t device, unsigned *least, unsigned *out) {
    ON(CARDS);
    *least = 0;
    return give_number(&found, MAX_LIMIT, out);
}

/* An enumeration is as wide as an unsigned number. */
CALL(nvmlDeviceGetPerformanceState, nvmlDevice_t device, nvmlPstates_t *out) {
    ON(CARDS);
    return give_number(&found, PSTATE, (unsigned *)out);
}

/* Each fan is told five percent more than the one before. */
CALL(nvmlDeviceGetFanSpeed_v2, nvmlDevice_t device, unsigned fan, unsigned *out) {
    ON(CARDS);
    if (!found.given[FANS] || fan >= number(found.value[FANS]))
        return NVML_ERROR_INVALID_ARGUMENT;
    TRY(give_number(&found, FAN, out));
    *out += 5 * fan;
    return NVML_SUCCESS;
}

#define CLOCK_CALL(name, sm, memory)                                                                                   \
    CALL(name, nvmlDevice_t device, nvmlClockType_t type, unsigned *out) {                                             \
        ON(CARDS);                                                                                                     \
        if (type != NVML_CLOCK_SM && type != NVML_CLOCK_MEM)                                                           \
            return NVML_ERROR_INVALID_ARGUMENT;                                                                        \
        return give_number(&found, type == NVML_CLOCK_SM ? sm : memory, out);                                          \
    }
CLOCK_CALL(nvmlDeviceGetClockInfo, SM_CLOCK, MEMORY_CLOCK)
CLOCK_CALL(nvmlDeviceGetMaxClockInfo, MAX_SM_CLOCK, MAX_MEMORY_CLOCK)

#define REASONS_CALL(name, key)                                                                                        \
    CALL(name, nvmlDevice_t device, unsigned long long *out) {                                                         \
        ON(CARDS);                                                                                                     \
        if (!found.given[key])                                                                                          \
            return NVML_ERROR_NOT_SUPPORTED;                                                                           \
        *out = number(found.value[key]);                                                                               \
        return NVML_SUCCESS;                                                                                           \
    }
REASONS_CALL(nvmlDeviceGetCurrentClocksEventReasons, REASONS)
REASONS_CALL(nvmlDeviceGetCurrentClocksThrottleReasons, REASONS)
REASONS_CALL(nvmlDeviceGetSupportedClocksEventReasons, SUPPORTED)
REASONS_CALL(nvmlDeviceGetSupportedClocksThrottleReasons, SUPPORTED)

#define ENGINE_CALL(name, key)                                                                                         \
    CALL(name, nvmlDevice_t device, unsigned *out, unsigned *period) {                                                 \
        ON(CARDS);                                                                                                     \
        *period = 167000;                                                                                              \
        return give_number(&found, key, out);                                                                          \
    }
ENGINE_CALL(nvmlDeviceGetEncoderUtilization, ENCODER)
ENGINE_CALL(nvmlDeviceGetDecoderUtilization, DECODER)

CALL(nvmlDeviceGetTemperatureThreshold, nvmlDevice_t device, nvmlTemperatureThresholds_t threshold, unsigned *out) {
    static const enum key keys[] = {SHUTDOWN, SLOWDOWN, MEMORY_MAX, GPU_MAX};
    ON(CARDS);
    return threshold > NVML_TEMPERATURE_THRESHOLD_GPU_MAX ? NVML_ERROR_INVALID_ARGUMENT
                                                          : give_number(&found, keys[threshold], out);
}

CALL(nvmlDeviceGetPcieThroughput, nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned *out) {
    ON(CARDS);
    return give_number(&found, counter == NVML_PCIE_UTIL_TX_BYTES ? SENT : RECEIVED, out);
}

CALL(nvmlDeviceGetAttributes_v2, nvmlDevice_t device, nvmlDeviceAttributes_t *out) {
    ON(PARTS);
    return give_number(&found, MPS, &out->multiprocessorCount);
}

/* ---- field values: each has an answer of its own ---- */

static void put(const Field *field, nvmlValue_t *to) {
    switch (field->type) {
    case NVML_VALUE_TYPE_DOUBLE: to->dVal = strtod(field->value, NULL); break;
    case NVML_VALUE_TYPE_UNSIGNED_INT: to->uiVal = (unsigned)strtoull(field->value, NULL, 0); break;
    case NVML_VALUE_TYPE_SIGNED_LONG_LONG: to->sllVal = strtoll(field->value, NULL, 0); break;
    case NVML_VALUE_TYPE_SIGNED_INT: to->siVal = (int)strtol(field->value, NULL, 0); break;
    case NVML_VALUE_TYPE_UNSIGNED_SHORT: to->usVal = (unsigned short)strtoul(field->value, NULL, 0); break;
    default: to->ullVal = strtoull(field->value, NULL, 0);
    }
}

static void answer_field(long card, nvmlFieldValue_t *asked) {
    asked->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    for (const Field *field = state.field; field < state.field + state.fields; field++)
        if (field->card == card && field->number == asked->fieldId && field->link == asked->scopeId) {
            asked->nvmlReturn = (nvmlReturn_t)field->error;
            asked->valueType = field->type;
            put(field, &asked->value);
        }
}

CALL(nvmlDeviceGetFieldValues, nvmlDevice_t device, int count, nvmlFieldValue_t *out) {
    ON(CARDS);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        answer_field(found.card, &out[i]);
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

/* ---- samples of what processes did: one each ---- */

static unsigned long long microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

CALL(nvmlDeviceGetProcessUtilization, nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned *out,
     unsigned long long since) {
    ON(CARDS);
    const unsigned room = samples == NULL ? 0 : *out;
    unsigned count = 0;
    pthread_mutex_lock(&lock);
    for (const Process *process = state.process; process < state.process + state.processes; process++)
        if (process->card == found.card && process->sampled && (process->at == 0 || process->at > since)) {
            if (count < room)
                samples[count] =
                    (nvmlProcessUtilizationSample_t){.pid = process->pid,
                                                     .timeStamp = process->at == 0 ? microseconds() : process->at,
                                                     .smUtil = (unsigned)process->sm};
            count++;
        }
    pthread_mutex_unlock(&lock);
    *out = count;
    return count == 0 ? NVML_ERROR_NOT_FOUND : count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* ---- events: a set has the lines that came after it was made, of the cards that it has ---- */

struct nvmlEventSet_st {
    unsigned seen, cards;
    nvmlDevice_t card[MAX_DEVICES];
};

CALL(nvmlEventSetCreate, nvmlEventSet_t *out) {
    FIND(the_system, NULL);
    *out = calloc(1, sizeof **out);
    (*out)->seen = state.xids;
    return NVML_SUCCESS;
}

CALL(nvmlEventSetFree, nvmlEventSet_t set) {
    FIND(the_system, NULL);
    free(set);
    return NVML_SUCCESS;
}

CALL(nvmlDeviceGetSupportedEventTypes, nvmlDevice_t device, unsigned long long *out) {
    ON(CARDS);
    *out = found.given[XIDS] ? nvmlEventTypeXidCriticalError : nvmlEventTypeNone;
    return NVML_SUCCESS;
}

CALL(nvmlDeviceRegisterEvents, nvmlDevice_t device, unsigned long long types, nvmlEventSet_t out) {
    ON(CARDS);
    if (!found.given[XIDS] || types != nvmlEventTypeXidCriticalError)
        return NVML_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    out->card[out->cards++] = device;
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

static bool has_card(const struct nvmlEventSet_st *set, const Device *device) {
    for (unsigned i = 0; device != NULL && i < set->cards; i++)
        if (set->card[i] == device->handle)
            return true;
    return false;
}

CALL(nvmlEventSetWait_v2, nvmlEventSet_t set, nvmlEventData_t *out, unsigned milliseconds) {
    FIND(the_system, NULL);
    nvmlReturn_t code = NVML_ERROR_TIMEOUT;
    (void)milliseconds;
    pthread_mutex_lock(&lock);
    while (code == NVML_ERROR_TIMEOUT && set->seen < state.xids) {
        const Xid *xid = &state.xid[set->seen++];
        const Device *device = at(xid->card, WHOLE);
        if (!has_card(set, device))
            continue;
        *out = (nvmlEventData_t){device->handle, nvmlEventTypeXidCriticalError, xid->code, 0xffffffff, 0xffffffff};
        code = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- GPM: a sample knows what it is of, and a metric is of the later sample ---- */

struct nvmlGpmSample_st {
    bool filled;
    double values[4];
};

CALL(nvmlGpmQueryDeviceSupport, nvmlDevice_t device, nvmlGpmSupport_t *out) {
    ON(CARDS);
    out->isSupportedDevice = found.given[GPM];
    return NVML_SUCCESS;
}

CALL(nvmlGpmSampleAlloc, nvmlGpmSample_t *out) {
    FIND(the_system, NULL);
    *out = calloc(1, sizeof **out);
    return NVML_SUCCESS;
}

CALL(nvmlGpmSampleFree, nvmlGpmSample_t sample) {
    FIND(the_system, NULL);
    free(sample);
    return NVML_SUCCESS;
}

static void fill(const Device *device, nvmlGpmSample_t sample) {
    static const enum key keys[] = {GPM, GPM_SM, GPM_TENSOR, GPM_MEMORY};
    for (unsigned i = 0; i < 4; i++)
        sample->values[i] = device->given[keys[i]] ? strtod(device->value[keys[i]], NULL) : -1;
    sample->filled = true;
}

CALL(nvmlGpmSampleGet, nvmlDevice_t device, nvmlGpmSample_t out) {
    ON(CARDS);
    if (!found.given[GPM])
        return NVML_ERROR_NOT_SUPPORTED;
    fill(&found, out);
    return NVML_SUCCESS;
}

CALL(nvmlGpmMigSampleGet, nvmlDevice_t device, unsigned instance, nvmlGpmSample_t out) {
    ON(CARDS);
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = NVML_ERROR_INVALID_ARGUMENT;
    for (const Device *part = state.device; part < state.device + state.devices; part++)
        if (part->card == found.card && part->slot != WHOLE && number(part->value[GI]) == instance) {
            fill(part, out);
            code = NVML_SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    return code;
}

CALL(nvmlGpmMetricsGet, nvmlGpmMetricsGet_t *asked) {
    static const unsigned numbers[] = {NVML_GPM_METRIC_GRAPHICS_UTIL, NVML_GPM_METRIC_SM_UTIL,
                                       NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL};
    FIND(the_system, NULL);
    if (!asked->sample1->filled || !asked->sample2->filled)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; i < asked->numMetrics; i++) {
        nvmlGpmMetric_t *metric = &asked->metrics[i];
        metric->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        for (unsigned known = 0; known < 4; known++)
            if (numbers[known] == metric->metricId && asked->sample2->values[known] >= 0) {
                metric->nvmlReturn = NVML_SUCCESS;
                metric->value = asked->sample2->values[known];
            }
    }
    return NVML_SUCCESS;
}
