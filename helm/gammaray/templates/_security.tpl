{{/*
Security context of a pod: (dict "values" pod values "user" id of the image's user). A null in the values removes a field.
*/}}
{{- define "gammaray.podSecurity" -}}
{{- $context := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if .values.runAsImageUser -}}
{{- $context = merge $context (dict "runAsUser" .user "runAsGroup" .user "fsGroup" .user "fsGroupChangePolicy" "OnRootMismatch") -}}
{{- end -}}
{{- include "gammaray.withoutNulls" (mergeOverwrite $context (.values.securityContext | default dict)) -}}
{{- end -}}

{{/* Security context of a container, of the values of its pod. */}}
{{- define "gammaray.containerSecurity" -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- include "gammaray.withoutNulls" (mergeOverwrite $context (.containerSecurityContext | default dict)) -}}
{{- end -}}

{{- define "gammaray.withoutNulls" -}}
{{- $kept := dict -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $kept $name $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end -}}
