{{/* Gateways that a route joins: (dict "root" $ "listener" name). */}}
{{- define "gammaray.parentRefs" -}}
{{- if .root.Values.gateway.className -}}
- name: {{ include "gammaray.fullname" .root }}
  sectionName: {{ .listener }}
{{- else -}}
{{- required "gateway.parentRefs: needed where gateway.className is empty" .root.Values.gateway.parentRefs | toYaml -}}
{{- end -}}
{{- end -}}
