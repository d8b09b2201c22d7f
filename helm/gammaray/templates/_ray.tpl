{{/* What a node says it has, by which Serve places one replica of its role there; quoted for KubeRay's shell. */}}
{{- define "gammaray.logicalResource" -}}
{{ printf `"{\"gammaray_%s\": 1}"` . | squote }}
{{- end -}}

{{/* Where Ray keeps its control state. */}}
{{- define "gammaray.faultTolerance" -}}
{{- $given := .Values.ray.faultTolerance -}}
{{- $bundled := not .Values.redis.urlSecret.name -}}
{{- if $given.redisAddress -}}
redisAddress: {{ $given.redisAddress }}
{{- with $given.passwordSecret }}
{{- if .name }}
redisPassword:
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- else if $bundled -}}
redisAddress: {{ include "gammaray.fullname" . }}-redis:6379
redisPassword:
  valueFrom:
    secretKeyRef: {{ include "gammaray.redisPasswordRef" . }}
{{- else -}}
{{- fail "ray.faultTolerance.redisAddress: needed where redis.urlSecret is given" -}}
{{- end -}}
{{- end -}}
